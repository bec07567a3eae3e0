"""The OpenAPI document and docs/openai.md name every route, field, option and error of the HTTP API."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from common.errors import InvalidRequest, error_classes
from common.wire import sampling_from_proto
from router.http import errors as http_errors
from router.http.anthropic.errors import ANTHROPIC, error_type
from router.http.anthropic.schema import CountTokensBody, MessagesBody, OutputConfig, Thinking, Tool, ToolChoice
from router.http.calls import completion_call
from router.http.errors import ErrorKind, kind_of
from router.http.responses.body import ResponsesBody
from router.http.routes import ENDPOINTS, openapi_document
from router.http.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.http.strict import parse_body
from tests.router.fake_worker import DECODE, FakeWorker
from tests.router.http.clients import fetch, http_cluster
from tests.router.test_tenants import serving

GUIDE = (Path(__file__).parents[3] / "docs" / "openai.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"[a-z_]+", GUIDE))
ANTHROPIC_GUIDE = (Path(__file__).parents[3] / "docs" / "anthropic.md").read_text(encoding="utf-8")
BODIES = (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, DetokenizeBody, MessagesBody, CountTokensBody)
UNTYPED = {"prompt", "messages", "system", "input"}
"""Lists of several forms: what reads them bounds them by `check_length`."""


def schemas() -> dict[str, Any]:
    found: dict[str, Any] = openapi_document()["components"]["schemas"]
    return found


async def test_door_serves_the_document_and_every_route_in_it() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        status, _headers, body = await fetch(http.port, "GET", "/openapi.json")
        assert (status, json.loads(body)) == (200, openapi_document())
        for path, operations in openapi_document()["paths"].items():
            for method in operations:
                status, _headers, _body = await fetch(http.port, method.upper(), path.replace("{name}", "fake"), b"{}")
                assert status == (400 if method == "post" else 200), (method, path)
            status, _headers, _body = await fetch(http.port, "DELETE", path)
            assert status == 405


@pytest.mark.parametrize("kind", BODIES)
def test_field_that_may_be_left_out_may_be_null(kind: type[Any]) -> None:
    components, place = {"schemas": schemas()}, f"#/components/schemas/{kind.__name__}/properties"
    for name in kind.model_fields.keys() - set(schemas()[kind.__name__].get("required", ())):
        assert jsonschema_rs.is_valid({"$ref": f"{place}/{name}", "components": components}, None), name


@pytest.mark.parametrize(("body", "prompt"), [(CompletionBody, "prompt"), (ResponsesBody, "input")])
def test_option_of_the_document_is_taken_with_its_values_and_no_other(body: type[Any], prompt: str) -> None:
    properties = schemas()[body.__name__]["properties"]
    options = {name: schema for name, schema in properties.items() if name not in body.model_fields}
    assert "service_tier" in options
    for name, schema in options.items():
        for value in schema.get("enum", ["anything"]):
            parse_body(body, json.dumps({prompt: "a", name: value}).encode())
        if "enum" in schema:
            with pytest.raises(InvalidRequest):
                parse_body(body, json.dumps({prompt: "a", name: "surely not"}).encode())


def check(option: str, value: float) -> None:
    """Take a body with that option through every check. Raises InvalidRequest."""
    body = {"prompt": "a", "max_tokens": 2**31 - 1, option: value, "use_beam_search": option == "length_penalty"}
    (request,) = completion_call(parse_body(CompletionBody, json.dumps(body).encode())).requests
    sampling_from_proto(request.sampling, default_seed=1).validate(vocab_size=256)


def test_documented_bounds_of_numbers_are_those_that_are_checked() -> None:
    properties = schemas()["CompletionBody"]["properties"]
    bounded = {name: schema for name, schema in properties.items() if "maximum" in schema}
    assert {"temperature", "top_k", "top_p", "seed", "n"} < set(bounded)
    for name, schema in bounded.items():
        check(name, schema["maximum"])
        refused = [schema["maximum"] + 1]
        if "minimum" in schema:
            check(name, schema["minimum"])
            refused.append(schema["minimum"] - 1)
        else:
            refused.append(schema["exclusiveMinimum"])
        for value in refused:
            with pytest.raises(InvalidRequest, match=name):
                check(name, value)


def test_option_that_python_calls_equal_is_refused_like_any_other() -> None:
    for body in (b'{"prompt": "a", "best_of": true}', b'{"prompt": "a", "use_beam_search": 0}'):
        with pytest.raises(InvalidRequest):
            parse_body(CompletionBody, body)


def test_schemas_are_json_schemas_and_resolve() -> None:
    document = openapi_document()
    for name in schemas():
        jsonschema_rs.meta.validate(schemas()[name])
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert used <= set(schemas())


@pytest.mark.parametrize("body", BODIES)
def test_every_list_and_object_of_a_body_has_a_bound(body: type[Any]) -> None:
    properties = body.model_json_schema()["properties"]
    for name in properties.keys() - UNTYPED:
        for form in properties[name].get("anyOf", [properties[name]]):
            if form.get("type") == "array":
                assert "maxItems" in form, name
            elif form.get("type") == "object":
                assert "maxProperties" in form, name


def test_documents_name_every_status_and_code_of_an_error() -> None:
    kinds = [each for each in vars(http_errors).values() if isinstance(each, ErrorKind)]
    kinds += [kind_of(cls("")) for cls in error_classes() if cls.__module__ == "common.errors"]
    statuses = {kind.status for kind in kinds} - {499}  # it reaches no client
    assert statuses | {200} == {int(status) for each in ENDPOINTS for status in each.statuses}
    rows = set(re.findall(r"^\| (\d{3}(?:, \d{3})*) \|", GUIDE, re.MULTILINE))
    assert statuses == {int(status) for row in rows for status in row.split(", ")}
    assert {kind.code for kind in kinds if kind.code} - {"client_gone"} <= NAMED


def test_guide_names_every_endpoint() -> None:
    guide = GUIDE.replace("{id}", "{name}")
    assert [each.name for each in ENDPOINTS if f"`{each.method} {each.public_path}`" not in guide] == []


@pytest.mark.parametrize("kind", [TokenizeBody, DetokenizeBody])
def test_guide_names_every_field_that_no_table_has(kind: type[Any]) -> None:
    assert set() < set(kind.model_fields) <= NAMED


@pytest.mark.parametrize("kind", [Thinking, Tool, ToolChoice, OutputConfig])
def test_guide_of_anthropics_api_names_every_field_that_no_table_has(kind: type[Any]) -> None:
    assert set() < set(kind.model_fields) <= set(re.findall(r"[a-z_]+", ANTHROPIC_GUIDE))


def test_guide_of_anthropics_api_names_every_type_of_an_error() -> None:
    rows = dict(re.findall(r"^\| (\d{3}) \| `([a-z_]+)` \|", ANTHROPIC_GUIDE, re.MULTILINE))
    statuses = {status for each in ENDPOINTS if each.dialect is ANTHROPIC for status in each.statuses} - {200}
    assert rows == {str(status): error_type(status) for status in statuses}


async def test_only_these_routes_answer_without_a_key() -> None:
    async with http_cluster(FakeWorker("d0", DECODE), config=serving(http_port=0)) as http:
        answered = {}
        for each in ENDPOINTS:
            path = each.public_path.replace("{name}", "fake")
            answered[each.path], _headers, _body = await fetch(http.port, each.method, path, b"{}")
            assert (answered[each.path] == 401) == (401 in each.statuses)
        assert {path: status for path, status in answered.items() if status != 401} == {
            "/health": 200,
            "/live": 200,
            "/version": 200,
            "/openapi.json": 200,
            "/metrics": 404,
            "/": 200,
            "/page.css": 200,
            "/page.js": 200,
        }


DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("document", ["openai.md", "anthropic.md"])
async def test_table_of_fields_says_what_the_door_does_with_each(document: str) -> None:
    from tests.router.http.field_table import write_tables  # and two clients, for which every other test would wait

    told = (DOCS / document).read_text(encoding="utf-8")
    assert await write_tables(told) == told, f"python -m tests.router.http.field_table docs/{document}"


def test_every_api_with_a_body_has_its_fields_in_a_table() -> None:
    from tests.router.http.field_table import APIS

    paths = {each.path for each in ENDPOINTS if each.body is not None and each.path.startswith("/v1/")}
    assert {api.path for api in APIS.values()} == paths


def test_every_field_has_a_value_to_send() -> None:
    from tests.router.http.field_table import APIS, fields_of

    missing = {name: sorted(fields_of(api) - api.values.keys()) for name, api in APIS.items()}
    assert not any(missing.values()), f"add a value for each to tests/router/http/field_values.py: {missing}"

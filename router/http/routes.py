"""The endpoints of the HTTP API, and the OpenAPI document that is derived from them, their bodies and errors.

Each endpoint has its route, body, answer and statuses here. The application (app.py), which names the handlers, serves
exactly these, and the document describes exactly these.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from common.version import installed_version
from router.http.anthropic.errors import ANTHROPIC
from router.http.anthropic.schema import SCHEMAS as ANTHROPIC_SCHEMAS
from router.http.anthropic.schema import CountTokensBody, MessagesBody
from router.http.errors import OPENAI, Dialect
from router.http.responses.body import ResponsesBody
from router.http.schema import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from router.http.strict import TEXT, TEXT_OR_NULL, const_schema, list_schema, object_schema, option_schemas

_EVERYWHERE = (400, 403, 405, 431)
"""Statuses of malformed HTTP, of a foreign page, of another method, and of a head without an end."""
_IDENTIFIED = (401,)
_WITH_BODY = (401, 408, 413, 415, 503)
_GENERATION = (*_WITH_BODY, 404, 422, 429, 500, 504)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and its method."""

    name: str
    method: str
    path: str
    """Path as Starlette writes it."""
    summary: str
    answer: str
    """Schema of the answer (below), or the content type of one that is not JSON."""
    errors: tuple[int, ...] = ()
    body: type[BaseModel] | None = None
    dialect: Dialect = OPENAI

    @property
    def is_of_page(self) -> bool:
        """Whether a browser loads it as the live page, or for it."""
        return self.name == "cluster" or self.name.startswith("page")

    @property
    def can_stream(self) -> bool:
        """Whether the answer may be a stream of events."""
        return self.body is not None and "stream" in self.body.model_fields

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every status with which a request may end."""
        return (200, *sorted({*_EVERYWHERE, *self.errors}))

    @property
    def public_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


def _get(name: str, path: str, summary: str, answer: str, *errors: int) -> Endpoint:
    return Endpoint(name, "GET", path, summary, answer, errors)


def _post(name: str, path: str, summary: str, answer: str, body: type[BaseModel], *errors: int) -> Endpoint:
    return Endpoint(name, "POST", path, summary, answer, errors, body)


def _messages(
    name: str, path: str, summary: str, answer: str, body: type[BaseModel], errors: tuple[int, ...]
) -> Endpoint:
    return Endpoint(name, "POST", f"/v1/messages{path}", summary, answer, errors, body, ANTHROPIC)


ENDPOINTS: tuple[Endpoint, ...] = (
    _post("completions", "/v1/completions", "Continue one or more texts", "Completion", CompletionBody, *_GENERATION),
    _post("chat", "/v1/chat/completions", "Answer a conversation", "ChatCompletion", ChatBody, *_GENERATION),
    _post("embeddings", "/v1/embeddings", "Embed one or more texts", "Embeddings", EmbeddingBody, *_GENERATION),
    _post("responses", "/v1/responses", "Answer a conversation, in items", "Response", ResponsesBody, *_GENERATION),
    _messages("messages", "", "Answer a conversation, as Anthropic's API does", "Message", MessagesBody, _GENERATION),
    _messages(
        "count_tokens", "/count_tokens", "Tokens of a conversation", "TokenCount", CountTokensBody, (*_WITH_BODY, 404)
    ),
    _get("models", "/v1/models", "The served models", "Models", *_IDENTIFIED),
    _get("model", "/v1/models/{name:path}", "One served model", "Model", *_IDENTIFIED, 404, 503),
    _post("tokenize", "/tokenize", "Text or a conversation to tokens", "Tokens", TokenizeBody, *_WITH_BODY, 404),
    _post("detokenize", "/detokenize", "Tokens to text", "Text", DetokenizeBody, *_WITH_BODY, 404),
    _get("health", "/health", "Whether a request that came now would be served", "Status", 503),
    _get("live", "/live", "Whether the router's process answers", "Status"),
    _get("metrics", "/metrics", "The router's Prometheus metrics, without router.auth", "text/plain", 404),
    _get("version", "/version", "The version of kvrelay", "Version"),
    _get("openapi", "/openapi.json", "This document", "Document"),
    _get("page", "/", "The live page of the cluster", "text/html", 404),
    _get("page_css", "/page.css", "The live page's style", "text/css", 404),
    _get("page_script", "/page.js", "The live page's script", "text/javascript", 404),
    _get("cluster", "/cluster", "The state of the cluster, for operators", "Cluster", *_IDENTIFIED, 403, 404, 503),
)


_MEANINGS = {
    400: "not HTTP/1.1, not JSON, or a value is not allowed; `param` names the field",
    401: "no API key, or an unknown one (`router.auth: api_key`)",
    403: "the tenant of the API key is not an operator; without keys, the host or the origin is a foreign one",
    404: "no such model, or nothing at this path",
    405: "another method",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body has another content encoding than gzip or deflate, or a web page does not declare it to be JSON",
    429: "refused for now; `retry-after` says when to come back",
    431: "request line and headers are too large",
    422: "workers were lost, one after the other, while they computed the request",
    500: "a step failed",
    503: "no worker is ready, the router stops, or as many requests run, or clients watch, as there are places for",
    504: "`kvrelay.timeout_s`, or the server's limit on a wait, has passed",
}


_COUNT = {"type": "integer", "minimum": 0}
_NESTED: dict[str, Any] = {"type": ["object", "null"]}
_USAGE = object_schema(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_MODEL = object_schema(
    id=TEXT,
    object=const_schema("model"),
    created=_COUNT,
    owned_by=TEXT,
    max_model_len=_COUNT,
    vocab_size=_COUNT,
)


def _answer(kind: str, **choice: Any) -> dict[str, Any]:
    choices = list_schema(object_schema(index=_COUNT, **choice, logprobs=_NESTED, finish_reason=TEXT))
    return object_schema(id=TEXT, object=const_schema(kind), created=_COUNT, model=TEXT, choices=choices, usage=_USAGE)


_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": object_schema(error=object_schema(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL)),
    "Completion": _answer("text_completion", text=TEXT),
    "ChatCompletion": _answer(
        "chat.completion", message=object_schema(role=const_schema("assistant"), content=TEXT, refusal={"type": "null"})
    ),
    "Embeddings": object_schema(
        object=const_schema("list"),
        data=list_schema(
            object_schema(
                object=const_schema("embedding"),
                index=_COUNT,
                embedding={"anyOf": [list_schema({"type": "number"}), TEXT | {"contentEncoding": "base64"}]},
            )
        ),
        model=TEXT,
        usage=object_schema(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Response": object_schema(
        id=TEXT,
        object=const_schema("response"),
        created_at=_COUNT,
        status=TEXT | {"enum": ["completed", "incomplete"]},
        model=TEXT,
        output=list_schema(object_schema(type=TEXT, id=TEXT, status=TEXT)),
        usage=object_schema(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Models": object_schema(object=const_schema("list"), data=list_schema(_MODEL)),
    "Model": _MODEL,
    "Tokens": object_schema(count=_COUNT, max_model_len=_COUNT, tokens=list_schema(_COUNT)),
    "Text": object_schema(prompt=TEXT),
    "Status": object_schema(status=const_schema("ok")),
    "Version": object_schema(version=TEXT),
    "Cluster": object_schema(
        status={"type": "object"},
        diagnosis={"type": "object"},
        decisions=list_schema({"type": "object"}),
        requests=list_schema({"type": "object"}),
        tenants=list_schema({"type": "object"}),
    ),
    "Document": object_schema(openapi=TEXT, info={"type": "object"}, paths={"type": "object"}),
    **ANTHROPIC_SCHEMAS,
}


@cache
def openapi_document() -> dict[str, Any]:
    """Return the document, which takes tenths of a second the first time. Not to be changed."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.public_path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvrelay",
            "version": installed_version(),
            "description": "OpenAI-compatible HTTP API, and Anthropic's Messages.",
        },
        "paths": paths,
        "components": {
            "schemas": {**_SCHEMAS, **_bodies()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": {str(status): _response(endpoint, status) for status in endpoint.statuses},
    }
    if 401 in endpoint.statuses:
        operation["security"] = [{"key": []}, {"header": []}, {}]
    if "{name}" in endpoint.public_path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [name]
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(endpoint.body.__name__)}
    return operation


def _response(endpoint: Endpoint, status: int) -> dict[str, Any]:
    if status != 200:
        return {"description": _MEANINGS[status], "content": _json(endpoint.dialect.error_schema)}
    content = _json(endpoint.answer) if endpoint.answer in _SCHEMAS else {endpoint.answer: {"schema": TEXT}}
    if endpoint.can_stream:
        content["text/event-stream"] = {"schema": object_schema(data=TEXT)}  # of each event
    return {"description": endpoint.summary, "content": content}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _bodies() -> dict[str, Any]:
    """Return the schemas of all bodies, with every known option."""
    models = [endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None]
    _, found = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = found["$defs"]
    for model in models:
        properties = schemas[model.__name__]["properties"]
        properties.update({name: option for name, option in option_schemas(model).items() if name not in properties})
    return schemas

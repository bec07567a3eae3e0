"""A web page that somebody visits is no client, unless the configuration or an API key says so."""

import json

import pytest

from common.config import RouterConfig
from router.http.browsers import BrowserRules
from tests.router.fake_worker import DECODE, FakeWorker
from tests.router.fakes import config_with
from tests.router.http.clients import COMPLETIONS, body_of, fetch, http_cluster

PAGE = "https://chat.example.com"


def rules(**keys: object) -> BrowserRules:
    return BrowserRules(RouterConfig.model_validate(keys), ["llm.example.com", "*.lb.example.com"])


def status_of(found: BrowserRules, method: str = "GET", **headers: str) -> int:
    told = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    error = found.refusal(method, told)
    return 200 if error is None else error.kind.status


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "10.1.2.3",
        "[::1]:8000",
        "localhost:1",
        "LocalHost",
        "router:8000",
        "llm.example.com",
        "a.lb.example.com:443",
    ],
)
def test_addresses_and_names_of_the_router_are_served_without_keys(host: str) -> None:
    assert status_of(rules(), host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "a.b.lb.example.com", "", ":80", "x@y", "[evil]"],
)
def test_other_names_are_refused_so_that_dns_rebinding_reads_nothing(host: str) -> None:
    assert status_of(rules(), host=host) == 403
    assert status_of(rules(auth="api_key"), host=host) == 200, "a page has no key"


def test_configured_host_is_served() -> None:
    assert status_of(rules(allowed_hosts=["llm.internal.example"]), host="LLM.internal.example.:80") == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://192.0.2.7:3000", "http://localhost.evil.example"]
)
def test_page_of_another_origin_runs_nothing(origin: str) -> None:
    json_post = {"host": "127.0.0.1:8000", "content_type": "application/json"}
    assert status_of(rules(), "POST", origin=origin, **json_post) == 403
    assert status_of(rules(auth="api_key"), "POST", origin=origin, **json_post) == 200
    assert status_of(rules(allowed_origins=[PAGE]), "POST", origin=PAGE, **json_post) == 200
    assert status_of(rules(allowed_origins=["*"]), "POST", origin=origin, **json_post) == 200


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1:8443", "http://[::1]:5173"])
def test_page_of_a_server_on_the_same_host_is_served_and_reads_the_answer(origin: str) -> None:
    json_post = {"origin": origin, "content_type": "application/json"}
    assert status_of(rules(), "POST", host="localhost:8000", **json_post) == 200
    assert status_of(rules(), "POST", host="192.0.2.1:8000", **json_post) == 403, "it is another host's page there"
    headers = [(b"host", b"127.0.0.1:8000"), (b"origin", origin.encode())]
    assert (b"access-control-allow-origin", origin.encode()) in rules().answer_headers("POST", headers)


def test_page_of_the_router_itself_is_served() -> None:
    own = {
        "host": "127.0.0.1:8000",
        "origin": "http://127.0.0.1:8000",
        "content_type": "application/json; charset=utf-8",
    }
    assert status_of(rules(), "POST", **own) == 200


@pytest.mark.parametrize("content_type", ["text/plain", "text/plain;application/json", "multipart/form-data", ""])
def test_body_for_which_a_browser_asks_nobody_is_not_run_as_json(content_type: str) -> None:
    own = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}
    assert status_of(rules(), "POST", content_type=content_type, **own) == 415
    assert status_of(rules(), "POST", content_type=content_type, host="127.0.0.1:8000") == 200, "no page sent it"


def test_link_to_the_live_page_works_and_a_hidden_load_of_it_does_not() -> None:
    cross = {"host": "localhost", "sec_fetch_site": "cross-site"}
    assert status_of(rules(), sec_fetch_mode="navigate", **cross) == 200
    assert status_of(rules(), sec_fetch_mode="no-cors", **cross) == 403


async def test_refusals_hold_on_every_path_and_before_any_work() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        for method, path in (("GET", "/cluster"), ("GET", "/"), ("GET", "/nothing"), ("OPTIONS", COMPLETIONS)):
            assert (await fetch(http.port, method, path, host="evil.example"))[0] == 403
        status, _, body = await fetch(http.port, "POST", COMPLETIONS, body_of(), origin="http://evil.example")
        assert (status, json.loads(body)["error"]["code"]) == (403, "foreign_page")


async def test_browser_is_told_what_an_allowed_page_may_do() -> None:
    config = config_with(http_port=0, allowed_origins=[PAGE])
    async with http_cluster(FakeWorker("d0", DECODE), config=config) as http:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        status, headers, _ = await fetch(http.port, "OPTIONS", COMPLETIONS, b"", origin=PAGE, **asked)
        assert status == 200
        assert headers["access-control-allow-origin"] == PAGE
        assert headers["access-control-allow-headers"] == "authorization"
        status, headers, _ = await fetch(http.port, "GET", "/v1/models", origin=PAGE)
        assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, PAGE, "origin")
        assert "access-control-allow-origin" not in (await fetch(http.port, "GET", "/v1/models"))[1]


async def test_live_page_is_shown_in_no_other_page_and_runs_only_its_own_script() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        for path in ("/", "/page.js", "/page.css", "/cluster"):
            headers = (await fetch(http.port, "GET", path))[1]
            assert "default-src 'self'" in headers["content-security-policy"]
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")
            assert headers["referrer-policy"] == "no-referrer"

"""Anthropic's endpoints at the door: keys, errors and their events, and clients that leave."""

import json
from typing import Any

import pytest

from common.errors import EngineFault, KvrelayError
from router.http.anthropic.errors import error_body
from tests.router.fake_worker import DECODE, FakeWorker, pair
from tests.router.fakes import config_with
from tests.router.http.clients import MESSAGES, HttpCluster, fetch, http_cluster, request_of, sent
from tests.router.test_tenants import KEYS, serving

COUNT = f"{MESSAGES}/count_tokens"
HI: list[Any] = [{"role": "user", "content": "hi"}]


async def ask(http: HttpCluster, path: str = MESSAGES, *, key: dict[str, str] | None = None, **fields: Any) -> Any:
    """Return status, headers and document."""
    told: dict[str, Any] = {"anthropic-version": "2023-06-01", "content-type": "application/json", **(key or {})}
    body = {"messages": HI} if path == COUNT and not fields else {"messages": HI, "max_tokens": 6, **fields}
    return await http.post(path, body, **told)


async def test_key_is_taken_from_either_header_and_a_wrong_one_is_refused_before_the_body() -> None:
    async with http_cluster(*pair(), config=serving(http_port=0)) as http:
        good: Any = ({"x-api-key": KEYS["a"]}, {"authorization": f"Bearer {KEYS['a']}"})
        for key in good:
            assert (await ask(http, key=key))[0] == (await ask(http, COUNT, key=key))[0] == 200
            assert (await fetch(http.port, "GET", "/v1/models", **key))[0] == 200
        wrong = {"x-api-key": KEYS["a"], "authorization": "Bearer wrong"}
        bad: Any = ({}, {"x-api-key": "sk-wrong"}, {"x-api-key": ""}, wrong)
        for key in bad:
            for path in (MESSAGES, COUNT):
                status, _headers, answer = await ask(http, path, key=key, no_such_field=1)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
                assert "wrong" not in answer["error"]["message"]
                assert ("x-api-key" in answer["error"]["message"]) == (key == {})
        ended = (await http.cluster.status()).router
        assert (ended.num_rejected, ended.num_failed) == (len(bad), 0)


async def test_answer_has_the_id_of_its_request(http: HttpCluster) -> None:
    status, headers, answer = await ask(http)
    assert (status, answer["stop_reason"]) == (200, "max_tokens")
    assert answer["id"] == "msg_" + headers["request-id"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_token": 1}, "max_token"),
        ({"messages": [{"role": "user", "content": "a" * 200}]}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "tool", "name": "a"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"kvrelay": {"ttft_s": -1}}, "kvrelay.ttft_s"),
    ],
)
async def test_bad_field_is_refused_by_its_name(http: HttpCluster, fields: dict[str, Any], param: str) -> None:
    status, _headers, answer = await ask(http, **fields)
    assert (status, answer["type"]) == (400, "error")
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)
    assert param.partition(".")[0] in answer["error"]["message"]
    ended = await http.cluster.until_idle()
    assert (ended.num_rejected, ended.num_failed) == (1, 0)


async def test_tools_that_are_not_counted_are_named(http: HttpCluster) -> None:
    status, headers, _ = await ask(http, COUNT, messages=HI, max_tokens=None, tools=[{"type": "web_search_20250305"}])
    assert status == 200
    assert "tools[0]" in headers["warning"] or "tools.0" in headers["warning"]


async def test_other_faults_have_the_form_of_anthropics_api(http: HttpCluster) -> None:
    for fields, path in (({"model": "other"}, MESSAGES), ({"model": "other", "max_tokens": None}, COUNT)):
        status, _headers, answer = await ask(http, path, **fields)
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, _headers, raw = await fetch(http.port, "GET", MESSAGES)
    assert (status, json.loads(raw)["type"]) == (405, "error")


async def test_no_worker_is_overloaded() -> None:
    async with http_cluster(config=config_with(http_port=0, queue_timeout_s=0.05)) as http:
        for path in (MESSAGES, COUNT):
            status, _headers, answer = await ask(http, path)
            assert (status, answer["error"]["type"]) == (503, "overloaded_error")


async def test_error_in_mid_stream_is_an_event_of_its_own() -> None:
    prefill, decode = pair()
    decode.faults["token 3"] = EngineFault("a step failed")
    async with http_cluster(prefill, decode, config=config_with(http_port=0, max_attempts=1)) as http:
        async with sent(http, request_of(MESSAGES, stream=True)) as reader:
            raw = await reader.read()
        assert raw.startswith(b"HTTP/1.1 200")
        assert b"event: message_start\ndata: " in raw
        *_, last = (line for line in raw.decode().splitlines() if line.startswith(("event: ", "data: ")))
        assert raw.decode().count("event: error\ndata: ") == 1
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "api_error"
        assert b"message_stop" not in raw
        assert (await http.cluster.until_idle()).num_failed == 1


async def test_tokens_are_counted_without_generating() -> None:
    decode = FakeWorker("d0", DECODE)
    async with http_cluster(decode) as http:
        _status, _headers, told = await ask(http, COUNT)
        assert told == {"input_tokens": len("user: hi\nassistant:")}
        assert decode.calls["started"] == 0


def test_message_of_an_error_names_the_field() -> None:
    for error, message in (
        (KvrelayError("too large", field="top_k"), "top_k: too large"),
        (KvrelayError("top_k is too large", field="top_k"), "top_k is too large"),
        (KvrelayError("too large"), "too large"),
    ):
        assert json.loads(error_body(error))["error"]["message"] == message

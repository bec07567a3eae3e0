"""Errors, as statuses, bodies and headers, and as the exceptions of OpenAI's own client."""

from typing import Any

import openai
import pytest

from common.errors import AccessDenied, EngineFault, KvrelayError, Unauthenticated
from tests.router.fake_worker import full_pair, pair
from tests.router.fakes import config_with, prompt_of
from tests.router.http.clients import CHAT, COMPLETIONS, HttpCluster, fetch, held_cluster, http_cluster
from tests.router.test_tenants import KEYS, serving

TURN: Any = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: Any = {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {**TEXT, "max_tokens": 2**40}, "max_tokens"),
        (COMPLETIONS, {**TEXT, "max_tokens": "many"}, "max_tokens"),
        (COMPLETIONS, {**TEXT, "stop": [""]}, "stop"),
        (COMPLETIONS, {**TEXT, "stop": [1]}, "stop[0]"),
        (COMPLETIONS, {**TEXT, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {**TEXT, "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {**TEXT, "logit_bias": {"300": 1}}, "logit_bias"),
        (COMPLETIONS, {**TEXT, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (COMPLETIONS, {**TEXT, "stop": ["x"] * 17}, "stop"),
        (COMPLETIONS, {**TEXT, "stop_token_ids": [1] * 257}, "stop_token_ids"),
        (COMPLETIONS, {**TEXT, "logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        (COMPLETIONS, {**TEXT, "best_of": 2, "n": 3}, "best_of"),
        (COMPLETIONS, {**TEXT, "use_beam_search": True, "n": 17}, "n"),
        (COMPLETIONS, {**TEXT, "use_beam_search": True, "n": 2, "stop": "."}, "stop"),
        (COMPLETIONS, {**TEXT, "use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
        (COMPLETIONS, {**TEXT, "length_penalty": 0.5}, "length_penalty"),
        (COMPLETIONS, {**TEXT, "stream_options": {"include_usage": True}}, "stream_options"),
        (
            COMPLETIONS,
            {**TEXT, "stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
        ),
        (COMPLETIONS, {**TEXT, "priority": 2**31}, "priority"),
        (COMPLETIONS, {**TEXT, "kvrelay": {"timeout_s": 0}}, "kvrelay.timeout_s"),
        (COMPLETIONS, {**TEXT, "kvrelay": {"ttft_s": -1}}, "kvrelay.ttft_s"),
        (COMPLETIONS, {**TEXT, "cache_salt": "m" * 257}, "cache_salt"),
        (COMPLETIONS, {**TEXT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {**TEXT, "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        (COMPLETIONS, {**TEXT, "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {**TEXT, "allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {**TEXT, "allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        (COMPLETIONS, {**TEXT, "allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids"),
        (COMPLETIONS, {**TEXT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {**TEXT, **{f"unknown_{number}": 1 for number in range(33)}}, "unknown_0"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [[1], [True]]}, "prompt[1][0]"),
        (COMPLETIONS, {"prompt": [1, 256]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (CHAT, {**TURN, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        (CHAT, {**TURN, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**TURN, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**TURN, "tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {**TURN, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {**TURN, "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        (CHAT, {**TURN, "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {**TURN, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {**TURN, "add_generation_prompt": False}, "add_generation_prompt"),
        (CHAT, {**TURN, "response_format": {"type": "yaml"}}, "response_format"),
        (CHAT, {**TURN, "response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        (CHAT, {**TURN, "response_format": {"type": "json_object", "schema": 1}}, "response_format"),
        (
            CHAT,
            {**TURN, "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
        ),
        (CHAT, {**TURN, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {**TURN, "structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        (CHAT, {**TURN, "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        (CHAT, {**TURN, "use_beam_search": True, "guided_regex": "a"}, "guided_regex"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_field_is_refused_by_its_name(
    shared_http: HttpCluster, path: str, fields: dict[str, Any], param: str
) -> None:
    cluster = shared_http.cluster
    before = await cluster.until_idle()
    status, _headers, document = await shared_http.post(path, fields)
    error = document["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert error["message"]
    after = await cluster.until_idle()
    assert (after.num_rejected, after.num_failed) == (before.num_rejected + 1, before.num_failed)


async def test_prompt_that_is_too_long_is_a_bad_request_with_openais_code(http: HttpCluster) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await http.complete(prompt=prompt_of(200), max_tokens=None)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        await http.chat(messages=[{"role": "user", "content": "a" * 200}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_unknown_model_is_not_found(http: HttpCluster) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await http.complete(model="other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await http.client.models.retrieve("a/b")


async def test_unknown_key_is_unauthenticated_before_the_body_is_read() -> None:
    async with http_cluster(*pair(), config=serving(http_port=0), api_key=KEYS["a"]) as http:
        assert (await http.complete(max_tokens=1)).choices
        with pytest.raises(openai.AuthenticationError) as caught:
            await http.client.with_options(api_key="sk-wrong").completions.create(model="fake", prompt="hi")
        assert caught.value.code == "invalid_api_key"
        assert "sk-wrong" not in caught.value.message
        for path in ("/v1/models", "/v1/models/fake"):
            status, headers, _body = await fetch(http.port, "GET", path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert (await fetch(http.port, "POST", "/tokenize", b"not JSON"))[0] == 401
        assert (await fetch(http.port, "GET", "/metrics"))[0] == 404
        assert (await fetch(http.port, "GET", "/health"))[0] == 200


async def test_full_queue_is_a_rate_limit_with_the_time_to_retry() -> None:
    async with http_cluster(*full_pair(), config=config_with(http_port=0, max_queued=1)) as http:
        with pytest.raises(openai.RateLimitError) as caught:
            await http.complete(prompt=["hi", "ho"], max_tokens=1)
        headers = caught.value.response.headers
        assert (headers["retry-after"], headers["retry-after-ms"]) == ("1", "1000")
        assert caught.value.code == "rate_limit_exceeded"
        await http.cluster.until_idle()


async def test_deadline_of_the_extension_is_a_gateway_timeout() -> None:
    async with held_cluster("token 2") as (http, _):
        with pytest.raises(openai.InternalServerError) as caught:
            await http.complete(kvrelay={"timeout_s": 0.3})
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        status = await http.cluster.until_idle()
        assert (status.num_failed, status.num_cancelled) == (1, 0)


async def test_no_worker_is_unavailable() -> None:
    async with http_cluster(config=config_with(http_port=0, queue_timeout_s=0.05)) as http:
        with pytest.raises(openai.InternalServerError) as caught:
            await http.complete()
        assert caught.value.status_code == 503
        assert (await http.client.models.list()).data == []


async def test_error_in_mid_stream_is_an_event_on_which_the_client_raises() -> None:
    prefill, decode = pair()
    decode.faults["token 3"] = EngineFault("a step failed")
    async with http_cluster(prefill, decode, config=config_with(http_port=0, max_attempts=1)) as http:
        stream = await http.complete(stream=True)
        with pytest.raises(openai.APIError, match="a step failed") as caught:
            async for _chunk in stream:
                pass
        assert caught.value.code == "engine_fault"
        assert (await http.cluster.until_idle()).num_failed == 1


async def test_error_before_the_first_token_of_a_stream_is_a_status() -> None:
    prefill, decode = pair()
    prefill.faults["prefill"] = EngineFault("a step failed")
    async with http_cluster(prefill, decode, config=config_with(http_port=0, max_attempts=1)) as http:
        with pytest.raises(openai.InternalServerError) as caught:
            await http.complete(stream=True)
        assert (caught.value.status_code, caught.value.type, caught.value.code) == (500, "server_error", "engine_fault")


@pytest.mark.parametrize("error", [Unauthenticated("the proof is not valid"), AccessDenied("cannot pull: not valid")])
@pytest.mark.parametrize("gate", ["reserve", "prefill", "token 1"])
async def test_worker_that_does_not_accept_the_router_is_no_fault_of_the_client(gate: str, error: KvrelayError) -> None:
    prefill, decode = pair()
    for worker in (prefill, decode):
        worker.faults[gate] = error
    async with http_cluster(prefill, decode) as http:
        await http.complete()

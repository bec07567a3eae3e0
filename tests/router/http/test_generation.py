"""Answers without failures, as OpenAI's own client reads them, and endpoints that generate nothing."""

import asyncio
import json
from typing import Any

import pytest

from common.config import ModelConfig, ServingConfig
from common.fake_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer
from common.tokens import as_tokens
from engine.text.grammar import Grammars
from kvrelay.v1 import sampling_pb2
from router.http.calls import completion_call
from router.http.generation import read_chat
from router.http.pieces import Prompt
from router.http.responses.call import read_response
from router.http.schema import CompletionBody
from router.http.strict import parse_body
from router.http.styles import CompletionStyle
from tests.router.fake_worker import DECODE, PREFILL, TIMEOUT_S, FakeWorker, answer, pair, sent_prompt
from tests.router.fakes import config_with, make_request, prompt_of
from tests.router.http.clients import COMPLETIONS, HttpCluster, fetch, http_cluster

pytestmark = pytest.mark.filterwarnings("error")
MESSAGES: Any = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]


async def test_completion_brings_every_token_and_the_usage() -> None:
    prefill, decode = pair()
    prefill.num_cached_tokens = 4
    async with http_cluster(prefill, decode) as http:
        reply = await http.complete(return_token_ids=True)
        (choice,) = reply.choices
        assert choice.model_extra == {"token_ids": answer(prompt_of(10), 6), "prompt_token_ids": prompt_of(10)}
        assert (choice.index, choice.finish_reason) == (0, "length")
        assert (reply.object, reply.model) == ("text_completion", "fake")
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (10, 6, 16)
        assert reply.usage.prompt_tokens_details.cached_tokens == 4
        assert (await http.cluster.until_idle()).num_completed == 1


async def test_completion_stream_brings_every_token_then_the_usage(http: HttpCluster) -> None:
    stream = await http.complete(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert [token for part in parts for token in part.choices[0].token_ids] == answer(prompt_of(10), 6)
    assert parts[0].choices[0].prompt_token_ids == prompt_of(10)
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (10, 6)
    assert len({chunk.id for chunk in chunks}) == 1
    await http.cluster.until_idle()


async def test_chat_is_tokenized_as_over_grpc() -> None:
    decode = FakeWorker("d0", DECODE)
    async with http_cluster(decode) as http:
        reply = await http.chat(messages=MESSAGES, max_completion_tokens=2)
        assert bytes(sent_prompt(decode.requests[0].sequence)) == b"system: be brief\nuser: hi\nassistant:"
        assert (reply.choices[0].message.role, reply.choices[0].finish_reason) == ("assistant", "length")


async def test_beam_search_reaches_the_workers_as_it_was_asked_for() -> None:
    decode = FakeWorker("d0", DECODE)
    async with http_cluster(decode) as http:
        beams: dict[str, Any] = {"use_beam_search": True, "length_penalty": 0, "early_stopping": True}
        assert len((await http.chat(n=3, max_tokens=2, **beams)).choices) == 3
        assert len((await http.complete(prompt="hi", n=3, max_tokens=2, **beams)).choices) == 3
        for request in decode.requests:
            sampling = request.sequence.sampling
            assert (sampling.n, sampling.use_beam_search) == (3, True)
            assert (sampling.length_penalty, sampling.early_stopping) == (0.0, True)


async def test_chat_stream_begins_each_choice_with_its_role(http: HttpCluster) -> None:
    chunks = [chunk async for chunk in await http.chat(n=2, max_tokens=3, stream=True)]
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


async def test_chat_stream_has_running_counts_and_prompt_ids_beside_its_choices(http: HttpCluster) -> None:
    options = {"continuous_usage_stats": True}
    stream = await http.chat(
        messages=MESSAGES, max_tokens=5, stream=True, stream_options=options, return_token_ids=True
    )
    chunks = [chunk async for chunk in stream if chunk.choices and chunk.choices[0].model_extra]
    counts = [len(chunk.choices[0].token_ids) for chunk in chunks]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [usage.completion_tokens for usage in usages] == [sum(counts[: i + 1]) for i in range(len(counts))]
    assert sum(counts) == 5
    assert bytes(chunks[0].prompt_token_ids).startswith(b"system: be brief")
    assert {usage.prompt_tokens for usage in usages} == {len(chunks[0].prompt_token_ids)}


async def test_options_reach_the_worker_under_their_own_names() -> None:
    decode = FakeWorker("d0", DECODE)
    unchanged: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.25,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "n": 2,
        "stop_token_ids": [9],
        "max_tokens": 7,
        "min_tokens": 3,
        "ignore_eos": True,
    }
    changed = {"top_k": -1, "seed": -1, "stop": "x", "logit_bias": {"65": -3}, "skip_special_tokens": False}
    async with http_cluster(decode) as http:
        await http.complete(prompt="hi", **unchanged, **changed)
    sent = decode.requests[0].sequence.sampling
    assert {name: getattr(sent, name) for name in unchanged} == unchanged
    assert (sent.top_k, sent.seed, list(sent.stop), dict(sent.logit_bias)) == (0, 2**64 - 1, ["x"], {65: -3})
    assert sent.include_special_tokens


@pytest.mark.parametrize(("path", "num_tokens"), [("completions", 16), ("chat", 20)])
async def test_length_without_a_limit_is_openais_or_the_servers(path: str, num_tokens: int) -> None:
    async with http_cluster(*pair(), config=config_with(http_port=0, default_max_tokens=20)) as http:
        reply = await (http.chat() if path == "chat" else http.complete(max_tokens=None))
        assert reply.usage.completion_tokens == num_tokens


async def test_completion_of_several_prompts_numbers_choices_by_prompt_and_sample(http: HttpCluster) -> None:
    prompts = [prompt_of(5), prompt_of(9)]
    reply = await http.complete(prompt=prompts, n=2, max_tokens=4, return_token_ids=True, kvrelay={"report": True})
    assert {choice.index: choice.token_ids for choice in reply.choices} == {
        2 * position + sample: answer(prompt, 4, sample) for position, prompt in enumerate(prompts) for sample in (0, 1)
    }
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (14, 16)
    assert len(reply.kvrelay["requests"]) == 2
    assert (await http.cluster.until_idle()).num_completed == 2


async def test_report_has_plan_timings_and_transfer() -> None:
    body = {"prompt": "hi", "max_tokens": 2, "seed": 7, "kvrelay": {"report": True}}
    async with http_cluster(*pair()) as http:
        _status, headers, document = await http.post(COMPLETIONS, body)
        (told,) = document["kvrelay"]["requests"]
        assert told["request_id"] == headers["x-request-id"]
        (plan,) = told["plans"]
        assert (plan["kind"], plan["decode_worker_id"]) == ("remote", "d0")
        assert plan["line_ttft_forecast"] is None  # it did not wait
        assert (plan["ttft_forecast"]["expected_s"] > 0, plan["ttft_forecast"]["low_s"]) == (True, None)
        assert (told["timings"]["prefill_s"], told["transfer"]["kv_bytes"], told["seed"]) == (0.25, 100, 7)


async def ask(http: HttpCluster, method: str, path: str, **fields: Any) -> Any:
    status, _headers, body = await fetch(http.port, method, path, json.dumps(fields).encode() if fields else b"")
    assert status == 200, body
    return json.loads(body)


FOLDER = "/srv/models/acme/chat-large"


@pytest.mark.parametrize(
    ("model", "name", "listed"),
    [
        (ModelConfig(aliases=("gpt-4o", "fake")), "gpt-4o", ["fake", "gpt-4o"]),
        (ModelConfig(id=FOLDER), FOLDER, ["fake"]),
    ],
    ids=["alias", "whole id"],
)
async def test_model_answers_to_its_other_names_at_both_doors_and_tells_no_path(
    model: ModelConfig, name: str, listed: list[str]
) -> None:
    config = ServingConfig(router=config_with(http_port=0), model=model)
    async with http_cluster(*pair(), config=config) as http:
        models = await ask(http, "GET", "/v1/models")
        assert [each["id"] for each in models["data"]] == listed
        assert (await ask(http, "GET", f"/v1/models/{name}"))["id"] == name
        assert await ask(http, "POST", "/v1/completions", model=name, prompt="a", max_tokens=1)
        request = make_request(max_tokens=1)
        request.model = name
        assert (await http.cluster.generate(request)).token_ids()
        status, _headers, refused = await http.post("/tokenize", {"model": "other", "prompt": "a"})
        assert (status, f"{', '.join(map(repr, listed))} is" in refused["error"]["message"]) == (404, True)
        assert "acme" not in f"{models} {refused}"


async def test_models_are_those_that_workers_told() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        (model,) = (await ask(http, "GET", "/v1/models"))["data"]
        assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == (
            *("fake", "model", "kvrelay"),
            200,
        )
        assert model["vocab_size"] == 256
        assert await ask(http, "GET", "/v1/models/fake") == model
        assert (await ask(http, "GET", "/v1/models/"))["data"] == [model]


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        told = await ask(http, "POST", "/tokenize", prompt="hé", return_token_strs=True)
        assert told == {
            "count": 3,
            "max_model_len": 200,
            "tokens": [104, 195, 169],
            "token_strs": ["h", "\ufffd", "\ufffd"],
        }
        assert await ask(http, "POST", "/detokenize", tokens=told["tokens"]) == {"prompt": "hé"}
        chat = await ask(http, "POST", "/tokenize", messages=[{"role": "user", "content": "hi"}])
        assert bytes(chat["tokens"]) == b"user: hi\nassistant:"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [256]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
async def test_tokens_of_nothing_sensible_are_refused(path: str, fields: dict[str, Any]) -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        assert (await http.post(path, fields))[0] == 400


async def test_health_version_and_metrics_are_told() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        assert await ask(http, "GET", "/health") == {"status": "ok"}
        assert set(await ask(http, "GET", "/version")) == {"version"}
        _status, headers, body = await fetch(http.port, "GET", "/metrics")
        assert headers["content-type"].startswith("text/plain")
        assert b"kvrelay_workers_ready 1.0" in body
        assert http.num_responses("/health", 200) == 1


async def test_tokens_without_a_worker_are_unavailable() -> None:
    async with http_cluster() as http:
        assert (await fetch(http.port, "POST", "/tokenize", b'{"prompt": "a"}'))[0] == 503


async def test_health_follows_the_workers_and_live_does_not() -> None:
    decode = FakeWorker("d0", DECODE)
    async with http_cluster(FakeWorker("p0", PREFILL)) as http, asyncio.timeout(TIMEOUT_S):

        async def answers(path: str) -> tuple[int, bytes]:
            status, _headers, body = await fetch(http.port, "GET", path)
            return status, body

        status, body = await answers("/health")
        assert (status, json.loads(body)["error"]["message"]) == (503, "no decode worker is ready")
        await decode.start()
        await http.cluster.set_workers(decode)
        while (await answers("/health"))[0] != 200:
            pass
        await decode.die()
        while (await answers("/health"))[0] != 503:
            pass
        assert await answers("/live") == (200, b'{"status": "ok"}')


async def test_health_of_a_router_that_sends_clients_elsewhere_is_bad() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        http.cluster.router.door.is_leaving = True
        assert (await fetch(http.port, "GET", "/health"))[0] == 503
        assert (await fetch(http.port, "GET", "/live"))[0] == 200


def test_prompt_logprobs_are_told_by_token_and_none_for_the_first() -> None:
    entries = [sampling_pb2.TokenLogprob(token_id=token_id, logprob=-token_id) for token_id in (5, 6, 7)]
    positions = [
        sampling_pb2.PositionLogprobs(),
        sampling_pb2.PositionLogprobs(chosen=entries[0], top=entries[1:]),
        sampling_pb2.PositionLogprobs(chosen=entries[2], top=entries[1:]),
    ]
    style = CompletionStyle(lambda token_ids: [f"t{token_id}" for token_id in token_ids])
    ((first, second, third),) = style.prompt_logprobs(
        Prompt(token_ids=as_tokens([1, 5, 7]), echo=None, logprobs=positions)
    )
    assert first is None
    assert second is not None
    assert list(second) == ["5", "6", "7"]
    assert second["5"] == {"logprob": -5, "rank": None, "decoded_token": "t5"}
    assert third == {name: second[name] for name in ("7", "6")}


async def test_prompt_logprobs_come_for_each_token(http: HttpCluster) -> None:
    (choice,) = (await http.complete(prompt_logprobs=0)).choices
    assert [list(position) for position in choice.prompt_logprobs] == [[str(token)] for token in prompt_of(10)]
    answered = await http.chat(prompt_logprobs=0, max_tokens=1)
    assert len(answered.prompt_logprobs) == answered.usage.prompt_tokens


async def test_requests_share_kv_only_under_the_same_salt() -> None:
    prefill, decode = pair()
    async with http_cluster(prefill, decode) as http:
        for salt in ("", "a", "a", "b"):
            await http.complete(cache_salt=salt)
        plain, first, again, other = [request.sequence.hash_root for request in decode.requests]
    assert first == again
    assert len({plain, first, other}) == 3


async def test_echo_of_a_prompt_that_is_cut_is_what_is_left_of_it(http: HttpCluster) -> None:
    (choice,) = (await http.complete(prompt="abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=1)).choices
    assert choice.text.startswith("ef")


async def test_top_p_of_zero_takes_the_most_probable_token() -> None:
    prefill, decode = pair()
    async with http_cluster(prefill, decode) as http:
        await http.complete(top_p=0)
        assert 0 < decode.requests[0].sequence.sampling.top_p < 1e-6


async def test_schema_beside_json_object_is_kept_to() -> None:
    schema = {"type": "object", "properties": {"n": {"const": 7}}}
    formats = ({"type": "json_object", "schema": schema}, {"type": "json_schema", "json_schema": {"schema": schema}})
    chats = [{"messages": MESSAGES, "response_format": {**each}} for each in formats]
    (first,), (second,) = [read_chat(json.dumps(each).encode()).requests for each in chats]
    assert first == second
    text = {"format": {"type": "json_object", "schema": schema}}
    (third,) = read_response(json.dumps({"input": "hi", "text": text}).encode()).requests
    assert json.loads(third.sampling.structured_outputs) == {"json": schema}


async def test_answer_of_allowed_tokens_has_no_others_and_ends_only_behind_one() -> None:
    body = {"prompt": "a", "allowed_token_ids": [70, 65, 70]}
    (request,) = completion_call(parse_body(CompletionBody, json.dumps(body).encode())).requests
    grammars = Grammars(byte_tokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset((EOS_TOKEN_ID,)))
    state = grammars.compile(request.sampling.structured_outputs).begin()
    assert state.allowed([]).nonzero()[0].tolist() == [65, 70]
    assert state.allowed([65]).nonzero()[0].tolist() == [65, 70, EOS_TOKEN_ID]

"""Bad input: the client gets one status that names the problem, and the router keeps running."""

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.config import RouterConfig
from common.errors import InvalidRequest, PromptTooLong, RequestError, UnknownModel, from_rpc_error
from kvrelay.v1 import inference_pb2, router_admin_pb2, sampling_pb2
from tests.router.fakes import (
    DECODE,
    TIMEOUT_S,
    FakeWorker,
    Shape,
    TestCluster,
    answer,
    make_request,
    prompt_of,
    running_cluster,
)

GENERATE = "/kvrelay.v1.InferenceService/Generate"


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    worker = FakeWorker("d0", DECODE, shape=Shape(num_blocks=20))
    async with running_cluster(worker, config=RouterConfig(max_message_mib=1)) as running:
        yield running


async def assert_healthy(cluster: TestCluster) -> None:
    assert (await cluster.generate(make_request(10))).token_ids() == answer(prompt_of(10), 6)
    await cluster.until_idle()


def with_sampling(**fields: Any) -> inference_pb2.GenerateRequest:
    ids = inference_pb2.TokenIds(ids=[1, 2, 3])
    return inference_pb2.GenerateRequest(token_ids=ids, sampling=sampling_pb2.SamplingParams(**fields))


def with_ids(*ids: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))


def with_chat(*roles: str, content: str = "x") -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role in roles]
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages))


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (inference_pb2.GenerateRequest(), InvalidRequest, "prompt"),
        (inference_pb2.GenerateRequest(text=""), InvalidRequest, "prompt"),
        (inference_pb2.GenerateRequest(text="x" * 20_000), PromptTooLong, "text"),
        (inference_pb2.GenerateRequest(text="x" * 200), PromptTooLong, "prompt"),
        (inference_pb2.GenerateRequest(text="x", model="other"), UnknownModel, "model"),
        (with_ids(), InvalidRequest, "prompt"),
        (with_ids(1, 256), InvalidRequest, "token_ids"),
        (with_ids(1, 2**32 - 1), InvalidRequest, "token_ids"),
        (with_ids(*[1] * 200), PromptTooLong, "prompt"),
        (with_chat(), InvalidRequest, "chat.messages"),
        (with_chat("user", "tool"), InvalidRequest, "chat.messages[1].role"),
        (with_chat(*["user"] * 200, content="x" * 64), PromptTooLong, "chat.messages"),
        (with_chat(*["user"] * 7000), InvalidRequest, "chat.messages"),
        (with_sampling(temperature=-1), InvalidRequest, "sampling.temperature"),
        (with_sampling(temperature=math.nan), InvalidRequest, "sampling.temperature"),
        (with_sampling(temperature=math.inf), InvalidRequest, "sampling.temperature"),
        (with_sampling(top_p=0), InvalidRequest, "sampling.top_p"),
        (with_sampling(top_p=math.nan), InvalidRequest, "sampling.top_p"),
        (with_sampling(top_k=2**32 - 1), InvalidRequest, "sampling.top_k"),
        (with_sampling(min_p=1.5), InvalidRequest, "sampling.min_p"),
        (with_sampling(repetition_penalty=0), InvalidRequest, "sampling.repetition_penalty"),
        (with_sampling(presence_penalty=-3), InvalidRequest, "sampling.presence_penalty"),
        (with_sampling(frequency_penalty=math.nan), InvalidRequest, "sampling.frequency_penalty"),
        (with_sampling(n=0), InvalidRequest, "sampling.n"),
        (with_sampling(n=2**32 - 1), InvalidRequest, "sampling.n"),
        (with_sampling(n=64), PromptTooLong, "sampling.max_tokens"),
        (with_sampling(max_tokens=0), InvalidRequest, "sampling.max_tokens"),
        (with_sampling(max_tokens=2**32 - 1), InvalidRequest, "sampling.max_tokens"),
        (with_sampling(max_tokens=100), PromptTooLong, "sampling.max_tokens"),
        (with_sampling(max_tokens=4, min_tokens=5), InvalidRequest, "sampling.min_tokens"),
        (with_sampling(stop=["x"] * 100), InvalidRequest, "sampling.stop"),
        (with_sampling(stop=[""]), InvalidRequest, "sampling.stop"),
        (with_sampling(stop=["x" * 10_000]), InvalidRequest, "sampling.stop"),
        (with_sampling(stop_token_ids=[256]), InvalidRequest, "sampling.stop_token_ids"),
        (with_sampling(logit_bias={256: 1.0}), InvalidRequest, "sampling.logit_bias"),
        (with_sampling(logit_bias={1: math.nan}), InvalidRequest, "sampling.logit_bias"),
        (with_sampling(logprobs=1000), InvalidRequest, "sampling.logprobs"),
        (with_sampling(prompt_logprobs=21), InvalidRequest, "sampling.prompt_logprobs"),
    ],
)
async def test_generate_with_a_bad_field_names_it(
    cluster: TestCluster, request_: inference_pb2.GenerateRequest, error: type[RequestError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await cluster.generate(request_)
    assert (type(caught.value), caught.value.field) == (error, field)
    await assert_healthy(cluster)


async def test_prompt_too_long_names_both_numbers(cluster: TestCluster) -> None:
    with pytest.raises(PromptTooLong, match="the prompt has 200 tokens; the model takes at most 199"):
        await cluster.generate(with_ids(*[1] * 200))


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\x0a\x02\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0a\x80\x80\x40" + b"x" * (1 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["invalid UTF-8", "garbage", "oversized"],
)
async def test_malformed_bytes_are_refused_and_the_router_lives_on(
    cluster: TestCluster, raw: bytes, code: grpc.StatusCode
) -> None:
    channel: Any = cluster.channel  # raw bytes are no message, says its type
    call = channel.unary_stream(GENERATE)(raw, timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _message in call:
            pass
    assert caught.value.code() is code
    await assert_healthy(cluster)


async def test_unknown_fields_are_ignored(cluster: TestCluster) -> None:
    raw = make_request(10).SerializeToString() + b"\xfa\x3f\x03abc"
    channel: Any = cluster.channel  # raw bytes are no message, says its type
    call = channel.unary_stream(GENERATE, response_deserializer=inference_pb2.GenerateResponse.FromString)(
        raw, timeout=TIMEOUT_S
    )
    messages = [message async for message in call]
    assert messages[-1].HasField("completed")


async def test_tokenize_without_input_names_the_field(cluster: TestCluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.inference.Tokenize(inference_pb2.TokenizeRequest())
    assert from_rpc_error(caught.value).field == "input"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"worker_id": ""}, "workers[1].worker_id"),
        ({"worker_id": "d0"}, "workers[1].worker_id"),
        ({"worker_id": "w" * 129}, "workers[1].worker_id"),
        ({"role": 0}, "workers[1].role"),
        ({"role": 77}, "workers[1].role"),
        ({"address": "nowhere"}, "workers[1].address"),
        ({"address": ":1"}, "workers[1].address"),
        ({"address": "h" * 400 + ":1"}, "workers[1].address"),
    ],
)
async def test_set_workers_with_a_bad_entry_changes_nothing(
    cluster: TestCluster, fields: dict[str, Any], field: str
) -> None:
    good = cluster.workers["d0"].endpoint
    bad = router_admin_pb2.WorkerEndpoint(**{"worker_id": "x", "role": DECODE, "address": "127.0.0.1:1", **fields})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.admin.SetWorkers(router_admin_pb2.SetWorkersRequest(workers=[good, bad]))
    assert from_rpc_error(caught.value).field == field
    assert [view.worker_id for view in (await cluster.status()).workers] == ["d0"]
    await assert_healthy(cluster)

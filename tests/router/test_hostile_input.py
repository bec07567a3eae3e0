"""Bad input gets one status that names the problem; requests are read within bounds, chats as of their time."""

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.chat_template import Conversation
from common.config import RouterConfig
from common.errors import InvalidRequest, Overloaded, PromptTooLong, RequestError, UnknownModel
from common.ids import RequestId
from common.tokens import as_tokens
from common.wire import pack_tokens
from kvrelay.v1 import inference_pb2, router_admin_pb2, sampling_pb2
from router.reading.codec import ByteCodec
from router.reading.token_cache import Encoded
from router.reading.validation import RequestReader
from router.record.budget import Budget
from router.record.record import Job
from router.record.resumption import MAX_RENDER_AGE_S
from router.tenants import ANYBODY
from tests.router.fake_worker import DECODE, FINGERPRINT, MODEL, TIMEOUT_S, FakeWorker, Shape, answer
from tests.router.fakes import TestCluster, config_with, make_request, prompt_of, running_cluster
from tests.rpc import answer_of

GENERATE, EMBED = (f"/kvrelay.v1.InferenceService/{name}" for name in ("Generate", "Embed"))


def small_cluster() -> AbstractAsyncContextManager[TestCluster]:
    worker = FakeWorker("d0", DECODE, shape=Shape(num_blocks=20))
    return running_cluster(worker, config=RouterConfig(max_message_mib=1))


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    async with small_cluster() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster() -> AsyncIterator[TestCluster]:
    async with small_cluster() as running:
        yield running


async def assert_healthy(cluster: TestCluster) -> None:
    assert (await cluster.generate(make_request(10))).token_ids() == answer(prompt_of(10), 6)
    await cluster.until_idle()


def with_sampling(**fields: Any) -> inference_pb2.GenerateRequest:
    ids = inference_pb2.TokenIds(ids=[1, 2, 3])
    return inference_pb2.GenerateRequest(token_ids=ids, sampling=sampling_pb2.SamplingParams(**fields))


def with_ids(*ids: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))


def with_objective(ttft_s: float) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="x", objective=inference_pb2.ServiceObjective(ttft_s=ttft_s))


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
        (with_chat("user", "critic"), InvalidRequest, "chat.messages[1].role"),
        (with_chat(*["user"] * 200, content="x" * 64), PromptTooLong, "chat.messages"),
        (with_chat(*["user"] * 7000), InvalidRequest, "chat.messages"),
        (with_sampling(temperature=math.nan), InvalidRequest, "sampling.temperature"),
        *((with_objective(seconds), InvalidRequest, "objective.ttft_s") for seconds in (0.0, -1.0, math.nan)),
        (with_sampling(n=64), PromptTooLong, "sampling.n"),
        (with_sampling(max_tokens=4, min_tokens=5), InvalidRequest, "sampling.min_tokens"),
        (with_sampling(stop=["x"] * 100), InvalidRequest, "sampling.stop"),
        (with_sampling(stop=[""]), InvalidRequest, "sampling.stop"),
        (with_sampling(stop=["x" * 10_000]), InvalidRequest, "sampling.stop"),
        (with_sampling(stop_token_ids=[256]), InvalidRequest, "sampling.stop_token_ids"),
        (with_sampling(logit_bias={256: 1.0}), InvalidRequest, "sampling.logit_bias"),
        (with_sampling(logit_bias={1: math.nan}), InvalidRequest, "sampling.logit_bias"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_generate_with_a_bad_field_names_it(
    shared_cluster: TestCluster, request_: inference_pb2.GenerateRequest, error: type[RequestError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await shared_cluster.generate(request_)
    assert (type(caught.value), caught.value.field) == (error, field)
    await assert_healthy(shared_cluster)


async def test_messages_that_wait_to_be_read_are_within_the_bound_of_their_tenant(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, is_waiting, may_be_read = cluster.router.door, asyncio.Event(), asyncio.Event()
    read = door.readers.read

    async def read_later(*arguments: Any, **options: Any) -> Any:
        is_waiting.set()
        await may_be_read.wait()
        return await read(*arguments, **options)

    monkeypatch.setattr(door.readers, "read", read_later)
    arrivals = door.parts.admission.arrivals = Budget("bytes", most=900_000, most_in_all=900_000)
    large = inference_pb2.GenerateRequest(text="x" * 600_000)
    first = asyncio.create_task(cluster.generate(large))
    await is_waiting.wait()
    with pytest.raises(Overloaded, match="at most 900000"):
        await cluster.generate(large)
    may_be_read.set()
    with pytest.raises(PromptTooLong):
        await first
    assert not arrivals.num_held


@pytest.mark.usefixtures("no_collecting")
async def test_refused_message_is_freed_before_garbage_is_collected(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, received = cluster.router.door, list[Any]()
    read = door.readers.read

    async def noted(reading: Any, raw: bytes, **options: Any) -> Any:
        message = await read(reading, raw, **options)
        received.extend((raw, message))
        return message

    monkeypatch.setattr(door.readers, "read", noted)
    with pytest.raises(PromptTooLong):
        await cluster.generate(inference_pb2.GenerateRequest(text="x" * 600_000))
    freed = [sys.getrefcount(object()) + 2] * 2
    # The thread that has read the message may have its frame to leave yet when the client has its answer.
    await cluster.until(lambda _router: [sys.getrefcount(each) for each in received] == freed)


async def test_prompt_too_long_names_both_numbers(cluster: TestCluster) -> None:
    with pytest.raises(PromptTooLong, match="the prompt has 200 tokens; at most 79 are taken"):
        await cluster.generate(with_ids(*[1] * 200))


@pytest.mark.parametrize(
    ("method", "raw", "code"),
    [
        (GENERATE, b"\x0a\x02\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT),
        (GENERATE, b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (EMBED, b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (GENERATE, b"\x0a\x80\x80\x40" + b"x" * (1 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["invalid UTF-8", "garbage", "garbage to embed", "oversized"],
)
async def test_malformed_bytes_are_refused_and_the_router_lives_on(
    cluster: TestCluster, method: str, raw: bytes, code: grpc.StatusCode
) -> None:
    channel: Any = cluster.channel  # raw bytes are no message, says its type
    call = channel.unary_stream(method)(raw, timeout=TIMEOUT_S)  # on the wire all kinds of calls are alike
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
    with pytest.raises(InvalidRequest) as caught:
        await cluster.ask("Tokenize", inference_pb2.TokenizeRequest())
    assert caught.value.field == "input"


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
    with pytest.raises(InvalidRequest) as caught:
        await answer_of(cluster.use([good, bad]))
    assert caught.value.field == field
    assert [view.worker_id for view in (await cluster.status()).workers] == ["d0"]
    await assert_healthy(cluster)


BEGAN_UNIX_S = 1_800_000_000
TEXT = inference_pb2.GenerateRequest(text="x")


class DatedCodec(ByteCodec):
    """A codec whose template writes the time."""

    def encode_chat_now(
        self, conversation: Conversation, *, rendered_unix_s: int, scope: bytes | None = None
    ) -> Encoded:
        return Encoded(as_tokens(f"{rendered_unix_s} {conversation.messages}".encode()))


def chat(**resume: Any) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role="user", content="hi")]
    request = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages))
    request.sampling.seed = 7
    if resume:
        request.resume.CopyFrom(inference_pb2.Resume(fingerprint=FINGERPRINT, **resume))
    return request


def begun(*token_ids: int) -> list[inference_pb2.ResumedSample]:
    return [inference_pb2.ResumedSample(tokens=pack_tokens(token_ids))]


async def read(request: inference_pb2.GenerateRequest, *, at_unix_s: float = BEGAN_UNIX_S) -> Job:
    reader = RequestReader(DatedCodec(), default_max_tokens=8, unix_s=lambda: at_unix_s)
    return await reader.read(request, request_id=RequestId("r"), model=MODEL, tenant=ANYBODY)


async def test_resumed_chat_is_rendered_as_of_the_time_it_began() -> None:
    first = await read(chat(), at_unix_s=BEGAN_UNIX_S + 0.9)
    resume = chat(rendered_unix_s=first.rendered_unix_s, samples=begun(1, 2))
    second = await read(resume, at_unix_s=BEGAN_UNIX_S + 3600)
    assert second.prompt_token_ids == first.prompt_token_ids
    assert second.rendered_unix_s == first.rendered_unix_s == BEGAN_UNIX_S
    assert second.prompt_token_ids != (await read(chat(), at_unix_s=BEGAN_UNIX_S + 3600)).prompt_token_ids


async def test_chat_without_a_token_so_far_may_be_rendered_anew() -> None:
    job = await read(chat(samples=begun()), at_unix_s=BEGAN_UNIX_S)
    assert job.rendered_unix_s == BEGAN_UNIX_S


async def test_prompt_that_is_no_chat_has_no_time() -> None:
    assert (await read(TEXT, at_unix_s=BEGAN_UNIX_S)).rendered_unix_s == 0


@pytest.mark.parametrize(
    "rendered_unix_s",
    [0, 1, BEGAN_UNIX_S - MAX_RENDER_AGE_S - 1, BEGAN_UNIX_S + MAX_RENDER_AGE_S + 1, 2**64 - 1],
)
async def test_resumed_chat_without_a_time_or_with_one_far_away_names_the_field(rendered_unix_s: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await read(chat(rendered_unix_s=rendered_unix_s, samples=begun(1)), at_unix_s=BEGAN_UNIX_S)
    assert caught.value.field == "resume.rendered_unix_s"


@pytest.mark.parametrize("age_s", [MAX_RENDER_AGE_S, 0, -MAX_RENDER_AGE_S])
async def test_time_of_another_routers_clock_is_taken(age_s: int) -> None:
    rendered_unix_s = BEGAN_UNIX_S - age_s
    job = await read(chat(rendered_unix_s=rendered_unix_s, samples=begun(1)), at_unix_s=BEGAN_UNIX_S)
    assert job.rendered_unix_s == rendered_unix_s


async def test_client_gets_the_render_time_and_a_resumed_answer_repeats_it() -> None:
    async with running_cluster(FakeWorker("d0", DECODE), config=config_with(local_prefill_max_tokens=64)) as cluster:
        told = (await cluster.generate(chat())).messages[0].accepted.rendered_unix_s
        assert told > BEGAN_UNIX_S - 10**9
        earlier = told - 1000
        again = await cluster.generate(chat(rendered_unix_s=earlier, samples=begun(1)))
        assert again.messages[0].accepted.rendered_unix_s == earlier
        assert (await cluster.generate(TEXT)).messages[0].accepted.rendered_unix_s == 0


def with_logprobs(num_tokens: int, prompt_logprobs: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1] * num_tokens),
        sampling=sampling_pb2.SamplingParams(prompt_logprobs=prompt_logprobs, max_tokens=1),
    )


async def test_log_probabilities_that_fit_in_no_message_are_refused() -> None:
    assert (await read(with_logprobs(131_072, 2))).sampling.num_prompt_logprobs == 2
    assert (await read(with_logprobs(300_000, 0))).sampling.num_prompt_logprobs == 0
    with pytest.raises(InvalidRequest, match="20 for each of 262144 tokens do not fit") as caught:
        await read(with_logprobs(262_144, 20))
    assert caught.value.field == "sampling.prompt_logprobs"


def test_log_probabilities_on_the_wire_stay_below_the_assumed_size() -> None:
    entry = sampling_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.0)
    position = sampling_pb2.PositionLogprobs(chosen=entry, top=[entry] * 20)
    message = inference_pb2.TokenDelta(prompt_logprobs=[position] * 100)
    assert message.ByteSize() <= 100 * (8 + 13 * 21)

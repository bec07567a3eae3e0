"""Reading requests: their bounds, and the time at which a chat is rendered."""

from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.ids import RequestId
from common.tokens import as_tokens
from common.wire import pack_tokens
from kvrelay.v1 import inference_pb2, sampling_pb2
from router.codec import ByteCodec
from router.facts import ModelFacts
from router.record import Job
from router.tenants import ANYBODY, Tenant
from router.token_cache import Encoded
from router.validation import MAX_RENDER_AGE_S, RequestReader
from tests.router.fakes import DECODE, FINGERPRINT, ROOT, FakeWorker, config_with, running_cluster

BEGAN_UNIX_S = 1_800_000_000
MODEL = ModelFacts(
    name="fake",
    fingerprint=FINGERPRINT,
    block_size=4,
    vocab_size=256,
    max_model_len=1 << 20,
    max_decode_blocks=1 << 20,
    root=ROOT,
)
TEXT = inference_pb2.GenerateRequest(text="x")


class DatedCodec(ByteCodec):
    """A codec whose template writes the time."""

    async def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        rendered_unix_s: int,
        tenant: Tenant = ANYBODY,
        scope: bytes | None = None,
    ) -> Encoded:
        return Encoded(as_tokens(f"{rendered_unix_s} {messages}".encode()))


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
    assert (await read(with_logprobs(131_072, 20))).sampling.num_prompt_logprobs == 20
    assert (await read(with_logprobs(600_000, 0))).sampling.num_prompt_logprobs == 0
    with pytest.raises(InvalidRequest, match="20 for each of 262144 tokens do not fit") as caught:
        await read(with_logprobs(262_144, 20))
    assert caught.value.field == "sampling.prompt_logprobs"


def test_log_probabilities_on_the_wire_stay_below_the_assumed_size() -> None:
    entry = sampling_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.0)
    position = sampling_pb2.PositionLogprobs(chosen=entry, top=[entry] * 20)
    message = inference_pb2.TokenDelta(prompt_logprobs=[position] * 100)
    assert message.ByteSize() <= 100 * (8 + 13 * 21)

"""The gRPC target against a scripted server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import EngineFault, Overloaded, Unreachable
from kvrelay.client.chat import ChatMessage
from kvrelay.v1 import inference_pb2, sampling_pb2
from measure.load.targets.interface import Target, TargetRequest, TargetSpec, make_target
from tests.client.fake_server import LIMIT_S, FakeInference, Hold, Step, serving
from tests.client.messages import accepted, completed, remote_plan, tokens


def run(first_index: int, ids: Sequence[int], *, last: bool = False) -> Step:
    """Return a message with a run of tokens."""
    delta = inference_pb2.TokenDelta()
    delta.runs.add(
        first_token_index=first_index,
        tokens=b"".join(token_id.to_bytes(4, "little") for token_id in ids),
        finish_reason=sampling_pb2.FINISH_REASON_LENGTH if last else sampling_pb2.FINISH_REASON_UNSPECIFIED,
    )
    return inference_pb2.GenerateResponse(tokens=delta)


@asynccontextmanager
async def target_of(fake: FakeInference, **spec: Any) -> AsyncIterator[Target]:
    with serving(fake) as address:
        target = make_target(TargetSpec(url=f"grpc://{address}", **spec))
        try:
            yield target
        finally:
            await target.aclose()


def request(prompt: str | Sequence[int] | Sequence[ChatMessage], **fields: Any) -> TargetRequest:
    return TargetRequest(prompt=prompt, num_prompt_tokens=3, num_output_tokens=3, seed=9, timeout_s=LIMIT_S, **fields)


async def test_token_prompt_is_answered_with_ids_and_the_servers_report() -> None:
    fake = FakeInference()
    fake.script = [accepted(), remote_plan(), run(0, [11, 12]), run(2, [13], last=True), completed()]
    counts: list[int] = []
    async with target_of(fake) as target:
        answer = await target.prepare(request([1, 2, 3]))(counts.append)

    assert counts == [2, 1]
    assert answer.token_ids == (11, 12, 13)
    sent = fake.generate_requests[0]
    assert list(sent.token_ids.ids) == [1, 2, 3]
    assert (sent.sampling.max_tokens, sent.sampling.ignore_eos, sent.sampling.detokenize) == (3, True, False)
    assert not sent.HasField("objective")
    report = answer.report
    assert (report.request_id, report.prefill_worker, report.decode_worker) == ("req-1", "prefill-0", "decode-0")
    assert (report.queue_s, report.prefill_s, report.transfer_exposed_s) == (0.001, 0.25, 0.002)
    assert (report.num_cached_tokens, report.transfer_bytes, report.transport) == (3, 3 << 20, "shm")


async def test_chat_is_answered_with_text_and_objectives_and_key_go_along() -> None:
    fake = FakeInference()
    asked = request((ChatMessage(role="user", content="hi"),), ttft_slo_s=1.5, tpot_slo_s=0.05)
    async with target_of(fake, api_key="secret") as target:
        answer = await target.prepare(asked)(lambda _num: None)
    assert answer.text == "Hello world"
    sent = fake.generate_requests[0]
    assert sent.sampling.detokenize
    assert (sent.objective.ttft_s, sent.objective.tpot_s) == pytest.approx((1.5, 0.05))
    assert fake.authorization == "Bearer secret"


async def test_tokens_of_one_message_are_one_piece() -> None:
    fake = FakeInference()
    fake.script = [accepted(), remote_plan(), tokens(["a", "b", "c"], last="length"), completed()]
    counts: list[int] = []
    async with target_of(fake) as target:
        await target.prepare(request("text"))(counts.append)
    assert counts == [3]


async def test_refusal_is_raised_as_the_client_raises_it() -> None:
    fake = FakeInference()
    fake.script = [Overloaded("full", retry_after_s=2.0)]
    async with target_of(fake) as target:
        with pytest.raises(Overloaded):
            await target.prepare(request([1]))(lambda _num: None)


async def test_cancelled_call_is_cancelled_on_the_server() -> None:
    fake = FakeInference()
    fake.script = [accepted(), remote_plan(), tokens(["a"]), Hold(), completed()]
    async with target_of(fake) as target, asyncio.timeout(LIMIT_S):
        began = asyncio.Event()
        call = asyncio.ensure_future(target.prepare(request("text"))(lambda _num: began.set()))
        await began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(fake.client_left.wait, LIMIT_S)


async def test_describe_and_sample_tell_model_workers_and_pages() -> None:
    async with target_of(FakeInference()) as target:
        info = await target.describe()
        sample = await target.sample(2.0)
    assert (info.system, info.model, info.max_model_len, info.vocab_size) == ("kvrelay", "tiny", 2048, 512)
    assert info.num_workers == {"prefill": 1, "decode": 1}
    assert sample is not None and sample.at_s == 2.0
    (worker,) = sample.workers  # the other one cannot be reached
    assert (worker.worker_id, worker.role, worker.num_running, worker.num_waiting) == ("prefill-0", "prefill", 1, 2)
    assert (worker.num_blocks, worker.num_used_blocks, worker.num_cached_blocks) == (64, 4, 9)
    assert (worker.num_computed_tokens, worker.num_cached_tokens) == (70, 30)


async def test_describe_without_a_server_is_unreachable() -> None:
    with serving(FakeInference()) as address:
        pass
    target = make_target(TargetSpec(url=address))
    with pytest.raises(Unreachable):
        await target.describe()
    await target.aclose()


async def test_answer_with_a_missing_part_is_an_engine_fault() -> None:
    fake = FakeInference()
    fake.script = [accepted(), run(0, [5, 6, 7], last=True), completed()]
    async with target_of(fake) as target:
        with pytest.raises(EngineFault, match="without sending accepted, plan and completed"):
            await target.prepare(request([1, 2, 3]))(lambda _num_tokens: None)

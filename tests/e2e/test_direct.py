"""Clients that stream straight from decode workers: the same answers, whatever happens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from common.errors import EngineFault, KvrelayError
from kvrelay.client import AsyncClient, Completed, PlanChosen, Token
from kvrelay.client.direct import DirectCall, InOrder
from kvrelay.v1 import decode_pb2, inference_pb2
from router.record.record import RunningRequest
from router.requests.worker_requests import CHECKPOINT_TOKENS
from tests.e2e.in_process import running_system
from tests.served_router import TIMEOUT_S

PROMPT = list(range(40))
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 150, "ignore_eos": True}
LOCAL: dict[str, Any] = {"local_prefill_max_tokens": 64}
REMOTE: dict[str, Any] = {"local_prefill_max_tokens": 0}
ENGINE: dict[str, Any] = {"num_blocks": 512}
LOGPROBS: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 0}
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"n": 3}, {"detokenize": False}, LOGPROBS)


@contextmanager
def noting_direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Notes the attempt of each answer that comes directly from a worker."""
    attempts: list[int] = []
    read_worker = DirectCall._read_worker  # noqa: SLF001 - nothing public tells which way a token came

    async def noted(self: DirectCall, grant: inference_pb2.DirectGrant) -> None:
        attempts.append(grant.attempt)
        await read_worker(self, grant)

    monkeypatch.setattr(DirectCall, "_read_worker", noted)
    yield attempts


@pytest.mark.parametrize("router", [LOCAL, REMOTE], ids=["local", "remote"])
async def test_direct_answers_equal_those_through_the_router(
    router: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_system(router=router, **ENGINE) as system:
        async with system.client() as client, system.client(direct=True) as direct:
            for number, variant in enumerate(VARIANTS):
                prompt, sampling = [number, *PROMPT], SAMPLING | variant
                expected = await client.generate(prompt, **sampling)
                with noting_direct(monkeypatch) as grants:
                    got = await direct.generate(prompt, **sampling)
                assert got.samples == expected.samples
                assert got.prompt_logprobs == expected.prompt_logprobs
                assert got.usage.num_output_tokens == expected.usage.num_output_tokens == 150 * sampling.get("n", 1)
                assert grants == [1]
        await system.until_idle()


async def test_worker_death_in_the_middle_is_a_pause_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(num_decode=2, router=REMOTE, step_s=0.002, **ENGINE) as system:
        async with system.client() as client:
            expected = await client.generate(PROMPT, **SAMPLING)
        with noting_direct(monkeypatch) as grants:
            async with system.client(direct=True) as client:
                system.pace.slow_down(at=110)
                stream = client.stream(PROMPT, **SAMPLING)
                plan = await _until(stream, num_tokens=100)
                await system.kill(plan.decode_worker_id)
                system.pace.hurry()
                got = await stream.result()
        assert got.samples == expected.samples
        assert len(got.plans) == 2
        assert got.plans[1].decode_worker_id != plan.decode_worker_id
        assert grants == [1, 2]


async def _until(stream: Any, *, num_tokens: int) -> PlanChosen:
    plan = None
    async for event in stream:
        if isinstance(event, PlanChosen):
            plan = event
        if isinstance(event, Token) and event.token_index + 1 == num_tokens:
            break
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    "sampling",
    [{}, {"n": 2}, {"detokenize": False}, LOGPROBS],
    ids=["text", "two samples", "ids", "logprobs"],
)
async def test_tokens_that_were_lost_with_their_worker_come_from_the_next_one(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints have reached the router, but no token has reached the client."""
    read_worker = DirectCall._read_worker  # noqa: SLF001 - a network that loses what the first worker sends

    async def lossy(self: DirectCall, grant: inference_pb2.DirectGrant) -> None:
        if grant.attempt > 1:
            await read_worker(self, grant)

    note_checkpoint, is_known = RunningRequest.note_checkpoint, asyncio.Event()

    def noting(self: RunningRequest, batch: decode_pb2.TokenBatch, *, expected: range) -> bool:
        has_end = note_checkpoint(self, batch, expected=expected)
        if min(self.ledger.lengths) > CHECKPOINT_TOKENS:
            is_known.set()
        return has_end

    async with running_system(num_decode=2, router=LOCAL, **ENGINE) as system:
        async with system.client() as reference:
            expected = await reference.generate(PROMPT, **SAMPLING, **sampling)
        monkeypatch.setattr(DirectCall, "_read_worker", lossy)
        monkeypatch.setattr(RunningRequest, "note_checkpoint", noting)
        async with system.client(direct=True) as client:
            stream = client.stream(PROMPT, **SAMPLING, **sampling)
            plan = next(event for event in [await anext(stream), await anext(stream)] if isinstance(event, PlanChosen))
            await asyncio.wait_for(is_known.wait(), TIMEOUT_S)
            await system.kill(plan.decode_worker_id)
            got = await stream.result()
    assert got.samples == expected.samples
    assert got.prompt_logprobs == expected.prompt_logprobs


def lose_tails(monkeypatch: pytest.MonkeyPatch, *, num_tails: int, timeout_s: float) -> None:
    """Lose the last token of the first streams on the network, though the worker takes it for delivered.

    `timeout_s`: how long the client waits for it.
    """
    take, num_lost = InOrder.take, 0

    def lossy(self: InOrder, tokens: Any) -> Iterator[inference_pb2.GenerateResponse]:
        nonlocal num_lost
        ends = [run for run in tokens.runs if run.finish_reason] or [
            each for each in tokens.tokens if each.finish_reason
        ]
        if not ends or num_lost == num_tails:
            yield from take(self, tokens)
        else:
            num_lost += 1

    monkeypatch.setattr(InOrder, "take", lossy)
    monkeypatch.setattr("kvrelay.client.direct._TAIL_TIMEOUT_S", timeout_s)


async def test_last_tokens_that_were_lost_with_their_worker_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        running_system(router=LOCAL, **ENGINE) as system,
        system.client() as reference,
        system.client(direct=True) as client,
    ):
        for variant in (VARIANTS[0], *VARIANTS[2:]):
            sampling = SAMPLING | variant
            expected = await reference.generate(PROMPT, **sampling)
            lose_tails(monkeypatch, num_tails=1, timeout_s=1.0)
            got = await client.generate(PROMPT, **sampling)
            assert got.samples == expected.samples
            assert got.prompt_logprobs == expected.prompt_logprobs
            assert got.usage.num_output_tokens == expected.usage.num_output_tokens
            await system.until_idle()


async def test_last_tokens_that_are_lost_every_time_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(router=LOCAL, **ENGINE) as system:
        lose_tails(monkeypatch, num_tails=100, timeout_s=0.2)
        async with system.client(direct=True) as client:
            with pytest.raises(EngineFault, match="last tokens could not be fetched"):
                await client.generate(PROMPT, **SAMPLING)
        await system.until_idle()


async def test_cancel_of_the_client_frees_everything() -> None:
    async with running_system(router=LOCAL, step_s=0.001, **ENGINE) as system, system.client(direct=True) as client:
        stream = client.stream(PROMPT, **SAMPLING)
        await _until(stream, num_tokens=20)
        await stream.aclose()
        await system.until_idle()


async def test_events_of_a_direct_answer_come_in_the_same_order() -> None:
    async with running_system(router=REMOTE, **ENGINE) as system, system.client(direct=True) as client:
        async with asyncio.timeout(TIMEOUT_S):
            events = [type(event).__name__ async for event in client.stream(PROMPT, **SAMPLING)]
        assert events[:2] == ["Accepted", "PlanChosen"]
        assert events[2:-1] == ["Token"] * 150
        assert events[-1] == Completed.__name__


async def test_closing_the_client_ends_its_direct_streams() -> None:
    async with running_system(router=LOCAL, step_s=0.002, **ENGINE) as system:
        client: AsyncClient = system.client(direct=True)
        system.pace.slow_down(at=20)
        stream = client.stream(PROMPT, **SAMPLING)
        await _until(stream, num_tokens=5)
        await client.aclose()
        system.pace.hurry()
        with pytest.raises(KvrelayError):
            await stream.result()
        await system.until_idle()

"""A decode worker that drains gives its running answers away: same text, nothing fails, the KV is pulled from it."""

import asyncio
from itertools import cycle
from typing import Any

import pytest

from kvrelay.client import AsyncClient, Generation, Token
from tests.e2e.in_process import TIMEOUT_S, System, running_system

NUM_STREAMS = 8
NUM_TOKENS = 100
SHAPE: dict[str, Any] = {"num_blocks": 2048, "max_step_tokens": 128, "step_s": 0.002}
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": NUM_TOKENS}


async def answer(
    client: AsyncClient, number: int, *, begun: asyncio.Event | None = None, num_phrases: int = 3
) -> Generation:
    """Return an answer of NUM_TOKENS; every other one is structured."""
    prompt = f"stream {number}: " + "what one worker has computed another one takes over; " * num_phrases
    options: dict[str, Any] = {"structured_outputs": {"json": NUMBERS}} if number % 2 else {"ignore_eos": True}
    async with client.stream(prompt, max_tokens=NUM_TOKENS, seed=number, **options) as events:
        async for event in events:
            if begun is not None and isinstance(event, Token):
                begun.set()
        return await events.result()


async def undisturbed(system: System) -> list[str]:
    async with system.client() as client:
        return [each.text for each in await asyncio.gather(*(answer(client, n) for n in range(NUM_STREAMS)))]


async def drained(system: System, worker_id: str) -> None:
    """Drain a worker and wait until nothing runs on it."""
    while (await system.drain(worker_id))[worker_id]:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.01)


async def decoding_worker(client: AsyncClient) -> str:
    """Return the only worker that runs something, as soon as workers have told the router so."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            views = (await client.status()).workers
            running = [view.worker_id for view in views if view.status is not None and view.status.load.num_running]
            if running:
                (only,) = running
                return only
            await asyncio.sleep(0.01)


async def test_twenty_drains_under_streams_change_no_text_and_fail_no_request() -> None:
    async with running_system(num_decode=3, **SHAPE) as system:
        expected = await undisturbed(system)
        async with system.client() as client:
            system.pace.slow_down(at=NUM_TOKENS // 2)
            begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
            running = asyncio.gather(*(answer(client, n, begun=event) for n, event in enumerate(begun)))
            await asyncio.gather(*(event.wait() for event in begun))
            for worker_id, number in zip(cycle(("d0", "d1", "d2")), range(20), strict=False):
                await drained(system, worker_id)
                if number == 2:  # everybody has moved
                    system.pace.hurry()
            done = await running
            status = (await client.status()).router
        await system.drain()

        assert [each.text for each in done] == expected
        assert status.num_failed == status.num_replans == 0
        assert sum(len(each.plans) - 1 for each in done) >= NUM_STREAMS, "everybody moves at least once"
        await system.until_idle()


async def test_moved_answer_pulls_its_kv_from_the_worker_that_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 30.0)  # a busy machine may take long
    # A long prompt in small, slow steps: fetching it is faster than computing it again.
    slow = SHAPE | {"max_step_tokens": 16, "step_s": 0.01}
    async with running_system(num_prefill=0, num_decode=2, router={"policy": "predictive"}, **slow) as system:
        async with system.client() as client:
            system.pace.slow_down(at=NUM_TOKENS // 2)
            begun = asyncio.Event()
            running = asyncio.create_task(answer(client, 1, begun=begun, num_phrases=14))
            await begun.wait()
            left = await decoding_worker(client)
            await drained(system, left)
            system.pace.hurry()
            done = await running
            statuses = {view.worker_id: view.status for view in (await client.status()).workers}

        first, second = done.plans
        assert first.decode_worker_id == left != second.decode_worker_id
        assert second.source_worker_id == left
        taker = statuses[second.decode_worker_id]
        assert taker is not None and taker.kv_bytes_received > 0


async def test_draining_worker_gets_no_new_requests() -> None:
    async with running_system(num_prefill=2, num_decode=2, **SHAPE) as system:
        await system.drain("d0", "p1")
        async with system.client() as client:
            done = await asyncio.gather(*(answer(client, n) for n in range(8)))
            states = {view.worker_id: view.state for view in (await client.status()).workers}

        assert {plan.decode_worker_id for each in done for plan in each.plans} == {"d1"}
        assert all(plan.prefill_worker_id in (None, "p0") for each in done for plan in each.plans)
        assert states == {"p0": "ready", "p1": "draining", "d0": "draining", "d1": "ready"}


async def test_prefill_worker_is_empty_as_soon_as_its_prompts_are_handed_over() -> None:
    policy = {"policy": "round_robin", "local_prefill_max_tokens": 0}
    async with running_system(num_prefill=2, num_decode=1, router=policy, **SHAPE) as system:
        async with system.client() as client:
            system.pace.slow_down(at=NUM_TOKENS // 2)
            begun = asyncio.Event()
            running = [asyncio.create_task(answer(client, n, begun=begun)) for n in range(4)]
            await begun.wait()
            await drained(system, "p0")
            assert not all(task.done() for task in running), "the answers were over before the worker was empty"
            system.pace.hurry()
            done = await asyncio.gather(*running)
            assert {plan.prefill_worker_id for each in done for plan in each.plans} == {"p0", "p1"}
            assert (await client.status()).router.num_replans == 0
        await system.until_idle()


async def test_last_decode_worker_serves_on_while_it_drains() -> None:
    async with running_system(num_decode=1, **SHAPE) as system:
        await system.drain("d0")
        async with system.client() as client:
            done = await answer(client, 1)

        assert len(done.plans) == 1


async def test_direct_stream_moves_too() -> None:
    async with running_system(num_decode=2, **SHAPE | {"step_s": 0.01}) as system:
        (expected, *_) = await undisturbed(system)
        async with system.client(direct=True) as client:
            system.pace.slow_down(at=NUM_TOKENS // 2)
            begun = asyncio.Event()
            running = asyncio.create_task(answer(client, 0, begun=begun))
            await begun.wait()
            left = await decoding_worker(client)
            await system.drain(left)
            system.pace.hurry()
            await drained(system, left)
            done = await running

        assert done.text == expected
        assert len(done.plans) == 2

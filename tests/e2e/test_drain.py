"""A worker that drains, or is told to end, gives its running answers away: same text, and nothing fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvrelay.client import AsyncClient, Generation
from tests.e2e.in_process import System, running_system
from tests.e2e.streams import NUM_STREAMS, answer, answers, running_streams
from tests.served_router import TIMEOUT_S
from tests.worker.cluster import running_pair

NUM_TOKENS, SLOW_AT = 60, 10
"""Tokens of an answer, and the one from which on they are slow, where something happens in its middle."""
GRACE_S = 60.0
SHAPE: dict[str, Any] = {"num_blocks": 2048, "max_step_tokens": 512, "step_s": 0.002}
REMOTE = {"policy": "round_robin", "local_prefill_max_tokens": 0}


@asynccontextmanager
async def slow_streams(
    system: System,
    client: AsyncClient,
    *,
    num_tokens: int = NUM_TOKENS,
    num_streams: int = NUM_STREAMS,
    num_begun: int = 1,
) -> AsyncIterator[Sequence["asyncio.Task[Generation]"]]:
    """Run streams beside the block, which begins when so many of them have; they are slow until it ends or hurries."""
    system.pace.slow_down(at=SLOW_AT)
    lengths = {"num_tokens": num_tokens, "num_streams": num_streams, "num_begun": num_begun}
    async with running_streams(client, **lengths) as running:
        yield running
        system.pace.hurry()


async def drained(system: System, worker_id: str) -> None:
    """Drain a worker and wait until nothing runs on it."""
    while (await system.drain(worker_id))[worker_id]:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.05)


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


async def until_draining(client: AsyncClient, worker_id: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await state_of(client, worker_id) != "draining":  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)


async def state_of(client: AsyncClient, worker_id: str) -> str:
    return next(view.state for view in (await client.status()).workers if view.worker_id == worker_id)


async def assert_nothing_failed(client: AsyncClient) -> None:
    status = (await client.status()).router
    assert status.num_failed == status.num_replans == 0


async def test_drains_under_streams_change_no_text_and_fail_no_request() -> None:
    async with running_system(num_decode=3, **SHAPE) as system, system.client() as client:
        async with slow_streams(system, client, num_begun=NUM_STREAMS) as running:
            for worker_id in ("d0", "d1", "d2") * 2:
                await drained(system, worker_id)
        await assert_nothing_failed(client)
        await system.drain()

        assert min(len(task.result().plans) for task in running) > 2, "everybody moves at least twice"
        await system.until_idle()


async def test_moved_answer_pulls_its_kv_from_the_worker_that_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 30.0)  # a busy machine may take long
    # A long prompt in small, slow steps: fetching it is faster than computing it again.
    slow = SHAPE | {"max_step_tokens": 16, "step_s": 0.01}
    predictive = {"policy": "predictive"}
    async with running_system(num_prefill=0, num_decode=2, router=predictive, **slow) as system:
        async with system.client() as client:
            system.pace.slow_down(at=SLOW_AT)
            begun = asyncio.Event()
            running = asyncio.create_task(answer(client, 1, num_tokens=NUM_TOKENS, num_phrases=14, on_begin=begun.set))
            await begun.wait()
            left = await decoding_worker(client)
            await drained(system, left)
            system.pace.hurry()
            first, second = (await running).plans
            statuses = {view.worker_id: view.status for view in (await client.status()).workers}

        assert first.decode_worker_id == left != second.decode_worker_id
        assert second.source_worker_id == left
        taker = statuses[second.decode_worker_id]
        assert taker is not None and taker.kv_bytes_received > 0


async def test_draining_worker_gets_no_new_requests() -> None:
    async with running_system(num_prefill=2, num_decode=2, **SHAPE) as system:
        await system.drain("d0", "p1")
        async with system.client() as client:
            done = await answers(client, num_tokens=NUM_TOKENS)
            states = {view.worker_id: view.state for view in (await client.status()).workers}

        assert {plan.decode_worker_id for each in done for plan in each.plans} == {"d1"}
        assert all(plan.prefill_worker_id in (None, "p0") for each in done for plan in each.plans)
        assert states == {"p0": "ready", "p1": "draining", "d0": "draining", "d1": "ready"}


async def test_prefill_worker_is_empty_as_soon_as_its_prompts_are_handed_over() -> None:
    async with running_system(num_prefill=2, router=REMOTE, **SHAPE) as system, system.client() as client:
        async with slow_streams(system, client) as running:
            await drained(system, "p0")
            assert not all(task.done() for task in running), "the answers were over before the worker was empty"
        used = {plan.prefill_worker_id for task in running for plan in task.result().plans}
        assert used == {"p0", "p1"}
        await assert_nothing_failed(client)
        await system.until_idle()


@pytest.mark.parametrize("ends", [False, True], ids=["drain", "end"])
async def test_direct_stream_moves_too(ends: bool) -> None:
    async with running_system(num_decode=2, **SHAPE | {"step_s": 0.01}) as system:
        async with system.client(direct=True) as client:
            # It moves only where the router knows its tokens.
            async with slow_streams(system, client, num_tokens=160, num_streams=1) as running:
                left = await decoding_worker(client)
                if ends:
                    system.pace.hurry()
                    await system.workers[left].stop(GRACE_S)
                else:
                    await system.drain(left)
                    system.pace.hurry()
                    await drained(system, left)
            await assert_nothing_failed(client)

        assert len(running[0].result().plans) == 2


@pytest.mark.parametrize("worker_id", ["d0", "p0"])
async def test_worker_that_ends_under_streams_changes_no_text_and_fails_none(worker_id: str) -> None:
    async with running_system(num_prefill=2, num_decode=2, router=REMOTE, **SHAPE) as system:
        async with system.client() as client:
            async with slow_streams(system, client) as running:
                await system.workers[worker_id].stop(GRACE_S)
            await assert_nothing_failed(client)

        assert worker_id == "p0" or any(len(task.result().plans) > 1 for task in running), "nothing moved"


async def test_last_worker_of_its_pool_serves_what_comes_until_it_goes() -> None:
    async with running_system(num_decode=1, **SHAPE) as system, system.client() as client:
        late_begun = asyncio.Event()
        async with slow_streams(system, client, num_streams=1) as running:
            ending = asyncio.create_task(system.workers["d0"].stop(GRACE_S))
            await until_draining(client, "d0")
            coming_late = asyncio.create_task(answer(client, 1, num_tokens=NUM_TOKENS, on_begin=late_begun.set))
            await late_begun.wait()
        await coming_late
        await ending

        assert len(running[0].result().plans) == 1
        await assert_nothing_failed(client)


async def test_answer_that_cannot_move_is_resumed_elsewhere_when_the_grace_is_over() -> None:
    # An answer moves after its next token; while its long prompt is computed there is none.
    slow: dict[str, Any] = {"num_blocks": 2048, "max_step_tokens": 16, "step_s": 0.01}
    local = {"policy": "round_robin", "local_prefill_max_tokens": 2000}
    async with running_system(num_prefill=0, num_decode=2, router=local, **slow) as system, system.client() as client:
        system.pace.slow_down(at=0)
        running = asyncio.create_task(answer(client, 2, num_tokens=NUM_TOKENS, num_phrases=15))
        async with asyncio.timeout(TIMEOUT_S):
            while all(each.runtime.calls.is_idle for each in system.workers.values()):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.005)
        (busy,) = (name for name, each in system.workers.items() if not each.runtime.calls.is_idle)
        await system.workers[busy].stop(0.05)
        system.pace.hurry()
        done = await running
        status = (await client.status()).router

        assert done.plans[0].decode_worker_id == busy != done.plans[-1].decode_worker_id
        assert status.num_failed == 0 < status.num_replans


async def test_membership_that_does_not_know_takes_nothing_back_from_a_worker_that_ends() -> None:
    async with running_system(num_decode=2, **SHAPE) as system, system.client() as client:
        with system.workers["d0"].runtime.calls.transfer():  # keeps it from going
            ending = asyncio.create_task(system.workers["d0"].stop(GRACE_S))
            await until_draining(client, "d0")
            for draining in ((), ("d0",)):
                await system.drain(*draining)
                assert await state_of(client, "d0") == "draining"
            done = await answer(client, 1, num_tokens=NUM_TOKENS)
            assert {plan.decode_worker_id for plan in done.plans} == {"d1"}
        await ending


async def test_worker_that_no_router_listens_to_does_not_wait_for_its_grace() -> None:
    async with running_pair(ends_empty=False) as pair, asyncio.timeout(GRACE_S / 2):
        with pair.decode.runtime.calls.transfer():
            await pair.decode.stop(GRACE_S)

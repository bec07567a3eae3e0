"""A worker that is told to end says so: what runs on it moves, or is resumed elsewhere when its grace is over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvrelay.client import AsyncClient, Generation
from tests.e2e.in_process import System, running_system
from tests.e2e.test_drain import EXPECTED, NUM_STREAMS, SHAPE, SLOW_AT, answer, decoding_worker, expected
from tests.served_router import TIMEOUT_S
from tests.worker.cluster import running_pair

GRACE_S = 60.0


@asynccontextmanager
async def streams_begun(client: AsyncClient) -> AsyncIterator["asyncio.Future[list[Generation]]"]:
    """Run all streams beside the block, which begins when the first of them has."""
    begun = asyncio.Event()
    running = asyncio.gather(*(answer(client, n, begun=begun) for n in range(NUM_STREAMS)))
    await begun.wait()
    yield running
    await running


async def state_of(client: AsyncClient, worker_id: str) -> str:
    (state,) = [view.state for view in (await client.status()).workers if view.worker_id == worker_id]
    return state


async def until_state(client: AsyncClient, worker_id: str, state: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await state_of(client, worker_id) != state:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("worker_id", ["d0", "p0"])
async def test_worker_that_leaves_under_streams_changes_no_text_and_fails_none(worker_id: str) -> None:
    policy = {"policy": "round_robin", "local_prefill_max_tokens": 0}
    async with running_system(num_prefill=2, num_decode=2, router=policy, **SHAPE) as system:
        system.pace.slow_down(at=SLOW_AT)
        async with system.client() as client:
            async with streams_begun(client) as running:
                await system.workers[worker_id].stop(GRACE_S)
                system.pace.hurry()
            status = (await client.status()).router

        done = running.result()
        assert [each.text for each in done] == EXPECTED
        assert worker_id == "p0" or any(len(each.plans) > 1 for each in done), "nothing moved"
        assert status.num_failed == status.num_replans == 0


async def test_last_worker_of_its_pool_serves_what_comes_until_it_goes() -> None:
    async with running_system(num_decode=1, **SHAPE) as system, system.client() as client:
        system.pace.slow_down(at=SLOW_AT)
        begun, late_begun = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(answer(client, 0, begun=begun))
        await begun.wait()
        leaving = asyncio.create_task(system.workers["d0"].stop(GRACE_S))
        await until_state(client, "d0", "draining")
        coming_late = asyncio.create_task(answer(client, 1, begun=late_begun))
        await late_begun.wait()
        system.pace.hurry()
        late, done = await coming_late, await running
        await leaving
        status = (await client.status()).router

        assert [done.text, late.text] == EXPECTED[:2]
        assert len(done.plans) == 1
        assert status.num_failed == status.num_replans == 0


async def test_answer_that_cannot_move_is_resumed_elsewhere_when_the_grace_is_over() -> None:
    # An answer moves after its next token; while its long prompt is computed there is none.
    slow: dict[str, Any] = {"num_blocks": 2048, "max_step_tokens": 16, "step_s": 0.01}
    policy = {"policy": "round_robin", "local_prefill_max_tokens": 2000}
    async with running_system(num_prefill=0, num_decode=2, router=policy, **slow) as system, system.client() as client:
        system.pace.slow_down(at=0)
        running = asyncio.create_task(answer(client, 2, num_phrases=15))
        left = await busy_worker(system, client)
        await system.workers[left].stop(0.05)
        system.pace.hurry()
        done = await running
        status = (await client.status()).router

        assert done.plans[0].decode_worker_id == left != done.plans[-1].decode_worker_id
        assert done.text == expected(2, num_phrases=15)
        assert status.num_failed == 0 < status.num_replans


async def busy_worker(system: System, client: AsyncClient) -> str:
    """Return the worker to which the first request goes."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            for name, worker in system.workers.items():
                if not worker.runtime.calls.is_idle:
                    return name
            await asyncio.sleep(0.005)


async def test_membership_that_does_not_know_takes_nothing_back_from_a_worker_that_leaves() -> None:
    async with running_system(num_decode=2, **SHAPE) as system, system.client() as client:
        with system.workers["d0"].runtime.calls.transfer():  # keeps it from going
            leaving = asyncio.create_task(system.workers["d0"].stop(GRACE_S))
            await until_state(client, "d0", "draining")
            await system.drain()
            assert await state_of(client, "d0") == "draining"
            await system.drain("d0")
            assert await state_of(client, "d0") == "draining"
            done = await answer(client, 1)
            assert {plan.decode_worker_id for plan in done.plans} == {"d1"}
        await leaving


async def test_direct_stream_moves_too() -> None:
    async with running_system(num_decode=2, **SHAPE | {"step_s": 0.01}) as system:
        async with system.client(direct=True) as client:
            system.pace.slow_down(at=SLOW_AT)
            begun = asyncio.Event()
            running = asyncio.create_task(answer(client, 0, begun=begun))
            await begun.wait()
            left = await decoding_worker(client)
            system.pace.hurry()
            await system.workers[left].stop(GRACE_S)
            done = await running
            status = (await client.status()).router

        assert done.text == EXPECTED[0]
        assert status.num_failed == status.num_replans == 0


async def test_worker_that_no_router_listens_to_does_not_wait_for_its_grace() -> None:
    async with running_pair(ends_empty=False) as pair, asyncio.timeout(GRACE_S / 2):
        with pair.decode.runtime.calls.transfer():
            await pair.decode.stop(GRACE_S)

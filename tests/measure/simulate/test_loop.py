import asyncio
import threading
from contextvars import copy_context

import pytest

from measure.simulate.loop import PROCESS, Deadlock, VirtualClock
from tests.measure.simulate.builders import current_loop, on_virtual_loop


@on_virtual_loop
async def test_virtual_loop_when_nothing_is_ready_jumps_to_the_next_timer() -> None:
    clock = VirtualClock(current_loop())
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, clock.monotonic()))

    await asyncio.gather(sleeper("year", 31_536_000.0), sleeper("day", 86_400.0), sleeper("now", 0))
    assert seen == [("now", 0.0), ("day", 86_400.0), ("year", 31_536_000.0)]


@on_virtual_loop
async def test_virtual_loop_timers_of_equal_time_fire_in_the_order_in_which_they_were_set() -> None:
    fired: list[int] = []
    for number in range(100):
        current_loop().call_at(5.0, fired.append, number)
    await asyncio.sleep(6)
    assert fired == list(range(100))


def test_virtual_loop_when_all_tasks_wait_raises_deadlock() -> None:
    @on_virtual_loop
    async def wait_forever() -> None:
        await current_loop().create_future()

    with pytest.raises(Deadlock, match="no task can go on"):
        wait_forever()


@on_virtual_loop
async def test_virtual_loop_run_in_executor_runs_on_the_loops_thread_and_is_done_at_once() -> None:
    done: asyncio.Future[int] = current_loop().run_in_executor(None, threading.get_ident)
    failed = current_loop().run_in_executor(None, int, "x")
    assert done.done()
    with pytest.raises(ValueError):
        await failed
    assert await done == threading.get_ident()


@on_virtual_loop
async def test_virtual_loop_when_many_timers_are_cancelled_forgets_them() -> None:
    for _ in range(5000):
        async with asyncio.timeout(3600):
            await asyncio.sleep(0.001)
    assert current_loop().num_timers < 1500
    assert current_loop().time() == pytest.approx(5.0)


@on_virtual_loop
async def test_virtual_loop_timeout_ends_a_wait_at_its_time() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await current_loop().create_future()
    assert current_loop().time() == 2.5


@on_virtual_loop
async def test_virtual_loop_a_stopped_process_runs_nothing_until_it_is_continued() -> None:
    loop, ticks = current_loop(), []

    async def tick() -> None:
        for _ in range(6):
            ticks.append(loop.time())
            await asyncio.sleep(1.0)

    context = copy_context()
    context.run(PROCESS.set, "worker")
    task = loop.create_task(tick(), context=context)
    await asyncio.sleep(1.5)
    loop.stop_process("worker")
    await asyncio.sleep(10.0)
    assert loop.is_stopped("worker")
    assert ticks == [0.0, 1.0]
    loop.continue_process("worker")
    await task
    assert ticks == [0.0, 1.0, 11.5, 12.5, 13.5, 14.5]

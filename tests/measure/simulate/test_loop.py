import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from measure.simulate.loop import Deadlock, VirtualClock, VirtualLoop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def current_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def test_virtual_loop_when_nothing_is_ready_jumps_to_the_next_timer() -> None:
    async def main() -> list[tuple[str, float]]:
        clock = VirtualClock(current_loop())
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, clock.monotonic()))

        await asyncio.gather(sleeper("year", 31_536_000.0), sleeper("day", 86_400.0), sleeper("now", 0))
        return seen

    assert run(main()) == [("now", 0.0), ("day", 86_400.0), ("year", 31_536_000.0)]


def test_virtual_loop_timers_of_equal_time_fire_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        loop = current_loop()
        fired: list[int] = []
        for number in range(100):
            loop.call_at(5.0, fired.append, number)
        await asyncio.sleep(6)
        return fired

    assert run(main()) == list(range(100))


def test_virtual_loop_when_everybody_waits_raises_deadlock() -> None:
    async def main() -> None:
        await current_loop().create_future()

    with pytest.raises(Deadlock, match="no task can go on"):
        run(main())


def test_virtual_loop_run_in_executor_runs_on_the_loops_thread_and_is_done_at_once() -> None:
    async def main() -> int:
        loop = current_loop()
        done: asyncio.Future[int] = loop.run_in_executor(None, threading.get_ident)
        failed = loop.run_in_executor(None, int, "x")
        assert done.done()
        with pytest.raises(ValueError):
            await failed
        return await done

    assert run(main()) == threading.get_ident()


def test_virtual_loop_when_many_timers_are_cancelled_forgets_them() -> None:
    async def main() -> tuple[int, float]:
        loop = current_loop()
        for _ in range(5000):
            async with asyncio.timeout(3600):
                await asyncio.sleep(0.001)
        return loop.num_timers, loop.time()

    num_timers, now_s = run(main())
    assert num_timers < 1500
    assert now_s == pytest.approx(5.0)


def test_virtual_loop_timeout_ends_a_wait_at_its_time() -> None:
    async def main() -> float:
        loop = current_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await loop.create_future()
        return loop.time()

    assert run(main()) == 2.5

"""The watchdog ends a process whose event loop hangs, and no busy, starved or stopped one."""

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from common import watchdog
from common.process import EXIT_HUNG
from common.watchdog import LOOP_HUNG_S, TICK_S, Watchdog
from tests.clock import ManualClock


class Process:
    """A process under a watchdog, with a clock of its own."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.is_loop_alive = True
        self.loop_waited_s = 0.0
        self.hang: str | None = None
        self.ended: list[str] = []
        self.watchdog = Watchdog(
            call_loop=self._call,
            waited_s=lambda: self.loop_waited_s,
            end=self.ended.append,
            clock=self.clock,
            looks=[lambda _awake_s: self.hang],
        )

    def _call(self, callback: Callable[[], None]) -> None:
        if self.is_loop_alive:
            callback()

    def pass_time(self, seconds: float, *, core_share: float = 1.0) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self.loop_waited_s += TICK_S * (1 - core_share)
            self.watchdog.check()


def test_event_loop_that_does_not_turn_ends_the_process() -> None:
    process = Process()
    process.pass_time(5)
    process.is_loop_alive = False
    process.pass_time(LOOP_HUNG_S)
    assert not process.ended
    process.pass_time(3 * TICK_S)
    assert "event loop" in process.ended[0]


def test_long_turn_on_a_crowded_host_is_no_hang() -> None:
    process = Process()
    process.is_loop_alive = False
    process.pass_time(9 * LOOP_HUNG_S, core_share=0.1)
    assert not process.ended
    process.pass_time(LOOP_HUNG_S, core_share=1.0)
    assert process.ended


def test_wait_for_a_core_that_the_kernel_tells_late_is_taken_back() -> None:
    process = Process()
    process.is_loop_alive = False
    process.pass_time(LOOP_HUNG_S - 1)
    process.loop_waited_s += LOOP_HUNG_S - 1
    process.pass_time(LOOP_HUNG_S - 1)
    assert not process.ended
    process.loop_waited_s += 1000
    process.pass_time(LOOP_HUNG_S + 1)
    assert process.ended, "what was taken back is no credit"


def test_process_that_was_stopped_for_an_hour_goes_on() -> None:
    process = Process()
    process.is_loop_alive = False
    process.pass_time(3)
    process.clock.advance(3600)
    process.pass_time(3)
    assert not process.ended


def test_what_else_hangs_ends_the_process_too() -> None:
    process = Process()
    process.pass_time(1)
    process.hang = "an engine step has taken more than 7 s"
    process.pass_time(TICK_S)
    assert process.ended == [process.hang]


_BLOCKED = """
import asyncio, time
from common import watchdog
watchdog.LOOP_HUNG_S = 0.1

async def serve():
    watchdog.Watchdog.of_this_process().start()
    asyncio.get_running_loop().call_soon(time.sleep, 600)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def test_callback_that_blocks_the_event_loop_ends_its_process_for_a_successor() -> None:
    ended = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_HUNG
    assert "event loop has not turned" in ended.stderr
    assert "most recent call first" in ended.stderr, "the log has what every thread was at"


async def test_event_loop_with_an_endless_line_of_short_callbacks_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ended, is_over = ManualClock(), list[str](), asyncio.Event()
    monkeypatch.setattr(watchdog, "SystemClock", lambda: clock)
    monkeypatch.setattr(watchdog, "_waits_of", lambda _thread_id: lambda: 0.0)
    monkeypatch.setattr(watchdog, "_end_process", ended.append)
    dog, loop = Watchdog.of_this_process(), asyncio.get_running_loop()
    until_s = clock.monotonic() + 3 * LOOP_HUNG_S

    def work() -> None:
        if clock.monotonic() < until_s:
            loop.call_soon(work)
        else:
            is_over.set()

    def look() -> None:
        clock.advance(TICK_S)
        dog.check()
        if not is_over.is_set():
            loop.call_soon(look)

    for _ in range(100):
        work()
    look()
    await is_over.wait()
    assert not ended
    assert dog.standing_s < LOOP_HUNG_S

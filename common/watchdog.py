"""Notices, on a thread of its own, what stands still in a process, and ends it: its supervisor starts another one.

An event loop hangs when it does not turn although it could. A busy one turns, however long its line is. One that gets
no core, or whose process was stopped (SIGSTOP, a frozen container, a suspended host), cannot turn: only time counts
that the watchdog itself was awake and the loop's thread did not wait for a core.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from common.clock import Clock, SystemClock
from common.process import EXIT_HUNG

logger = logging.getLogger(__name__)

STANDS_S = 3.0
"""Time without a turn of the event loop after which `/live` says that it stands."""
LOOP_HUNG_S = 7.0
"""Time without a turn of the event loop after which it hangs."""
TICK_S = 0.25
"""Time between two looks. It bounds how late a hang is found; and a process that gets its turn more rarely than every
second look is not awake in between, so that a starved host has longer."""

Look = Callable[[float], str | None]
"""Looks at one more part of the process, `awake_s` after the last look; returns why the process hangs, or None."""


class Watchdog:
    """Checks one process."""

    def __init__(
        self,
        *,
        call_loop: Callable[[Callable[[], None]], object],
        waited_s: Callable[[], float],
        end: Callable[[str], None],
        clock: Clock,
        looks: Sequence[Look] = (),
    ) -> None:
        """`call_loop` runs a function on the event loop, from any thread; `end` ends the process for a reason.

        `waited_s`: seconds that the loop's thread has waited for a core so far.
        """
        self._call_loop = call_loop
        self._waited_s = waited_s
        self._end = end
        self._clock = clock
        self._looks = looks
        self._last_s = clock.monotonic()
        self._last_waited_s = waited_s()
        self._chance_s = 0.0
        """Time in which the loop could have turned."""
        self._turned_s = 0.0
        """The same at its last known turn."""

    @classmethod
    def of_this_process(cls, *looks: Look) -> "Watchdog":
        """Return the watchdog of this process and of the running event loop, not started."""
        return cls(
            call_loop=asyncio.get_running_loop().call_soon_threadsafe,
            waited_s=_waits_of(threading.get_native_id()),
            end=_end_process,
            clock=SystemClock(),
            looks=looks,
        )

    def start(self) -> None:
        """Check at every tick for as long as the process lives."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(TICK_S):
            try:
                self.check()
            except RuntimeError:  # the event loop is closed: the process ends by itself
                return

    def check(self) -> None:
        """Look once. Raises RuntimeError when the event loop is closed."""
        now_s, waited_s = self._clock.monotonic(), self._waited_s()
        awake_s = min(now_s - self._last_s, 2 * TICK_S)
        # A wait is told when it is over, so it may take back what earlier looks have counted.
        chance_s = self._chance_s + awake_s - (waited_s - self._last_waited_s)
        self._chance_s = max(self._turned_s, chance_s)
        self._last_s, self._last_waited_s = now_s, waited_s
        reasons = [look(awake_s) for look in self._looks]
        if self.standing_s > LOOP_HUNG_S:
            reasons.append(f"the event loop has not turned for {LOOP_HUNG_S:.0f} s")
        for reason in filter(None, reasons):
            self._end(reason)
        self._call_loop(self._turn)

    @property
    def standing_s(self) -> float:
        """Seconds for which the event loop has not turned although it could, to a tick; any thread may ask."""
        return self._chance_s - self._turned_s

    def _turn(self) -> None:
        self._turned_s = self._chance_s


def _waits_of(thread_id: int) -> Callable[[], float]:
    """Return a function for the seconds that a thread of this process has waited for a core; 0 where none are told."""
    path = Path(f"/proc/self/task/{thread_id}/schedstat")

    def waited_s() -> float:
        try:
            _ran, waited_ns, *_ = path.read_bytes().split()
        except (OSError, ValueError):  # another system, or a kernel without these figures
            return 0.0
        return int(waited_ns) / 1e9

    return waited_s


def _end_process(reason: str) -> None:
    logger.critical("this process hangs and is ended: %s", reason)
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(EXIT_HUNG)

"""Wakes tasks at exact times.

Event loop timers have a resolution of milliseconds, too coarse for time stamps of tokens. On Linux one kernel timer
(timerfd, CLOCK_MONOTONIC, nanoseconds) is armed for the next waiter: no thread, no spinning.
"""

import asyncio
import ctypes
import heapq
import itertools
import os
import sys
import time
from typing import Protocol

from common.clock import Clock, SystemClock

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_NS = 1_000_000_000
_YIELDING_S = 0.002


class Alarm(Protocol):
    """Wakes tasks of one event loop."""

    async def until(self, when_s: float) -> None:
        """Return at `when_s` of the monotonic clock, or at once when that has passed."""

    def close(self) -> None:
        """Stop waking tasks."""


def make_alarm() -> Alarm:
    """Return the most exact alarm of this platform, by `time.monotonic`. Belongs to the running event loop."""
    return KernelAlarm() if sys.platform.startswith("linux") else LoopAlarm(SystemClock())


class LoopAlarm:
    """Sleeps until shortly before, then lets other tasks run until it is time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def until(self, when_s: float) -> None:
        """Return at `when_s`, or at once when that has passed."""
        if (early_s := when_s - self._clock.monotonic() - _YIELDING_S) > 0:
            await asyncio.sleep(early_s)
        while self._clock.monotonic() < when_s:  # noqa: ASYNC110 - no event signals the time
            await asyncio.sleep(0)

    def close(self) -> None:
        """Do nothing."""


class KernelAlarm:
    """One timerfd for the earliest of all waiters. Linux only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiters: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._fd = _timerfd_create()
        self._loop.add_reader(self._fd, self._ring)

    async def until(self, when_s: float) -> None:
        """Return at `when_s`, or at once when that has passed."""
        if when_s <= time.monotonic():
            return
        woken: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._waiters, (when_s, next(self._numbers), woken))
        if self._waiters[0][2] is woken:
            self._arm()
        await woken

    def close(self) -> None:
        """Stop waking tasks."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)  # the descriptor stays ready until it is read
        except BlockingIOError:
            return  # rearmed in between
        now_s = time.monotonic()
        while self._waiters and (self._waiters[0][0] <= now_s or self._waiters[0][2].done()):
            _when_s, _number, woken = heapq.heappop(self._waiters)
            if not woken.done():  # its task may have been cancelled
                woken.set_result(None)
        self._arm()

    def _arm(self) -> None:
        if self._waiters:
            _timerfd_settime(self._fd, self._waiters[0][0])


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _ITimerSpec(ctypes.Structure):
    _fields_ = (("it_interval", _TimeSpec), ("it_value", _TimeSpec))


_libc = ctypes.CDLL(None, use_errno=True)


def _timerfd_create() -> int:
    fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create failed")
    return fd


def _timerfd_settime(fd: int, when_s: float) -> None:
    """Arm for an absolute time; a past time fires at once."""
    seconds, nanoseconds = divmod(max(1, int(when_s * _NS)), _NS)
    spec = _ITimerSpec(_TimeSpec(0, 0), _TimeSpec(seconds, nanoseconds))
    if _libc.timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
        raise OSError(ctypes.get_errno(), "timerfd_settime failed")

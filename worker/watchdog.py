"""Notices an engine or an event loop that hangs: first for the routers, then for good.

An engine step is *overdue* when it takes far longer than predicted. Every update says so, and routers move the answers
of an overdue worker elsewhere while another one can take them. A step that stays overdue, or an event loop that no
longer turns, ends the process: its supervisor starts a new one, and the new epoch fences whatever the old one held.

A process that was stopped (SIGSTOP, a frozen container, a suspended host) or got no core is not hung: only time that
the watchdog itself was awake counts.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

from common.clock import Clock, SystemClock
from common.process import EXIT_HUNG
from common.timing import StepShape, TimingModel
from engine.thread import RunningStep
from worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

OVERDUE_S, OVERDUE_FACTOR = 1.0, 5.0
"""A step is overdue after this many seconds, or this many times its prediction if that is more."""
HUNG_S, HUNG_FACTOR = 7.0, 20.0
"""A step that takes this long hangs. A supervisor waits as long for a process that does not answer."""
UNMEASURED_OVERDUE_S, UNMEASURED_HUNG_S = 20.0, 120.0
"""The same for steps of a kind that was not measured yet: caches are cold, and the model may be large."""
COMPILING_HUNG_S = 600.0
"""Time after which such a step hangs where it may compile kernels."""
LOOP_HUNG_S = 7.0
"""Time without a turn of the event loop after which it hangs."""
TICK_S = 0.25
"""Time between two looks. It bounds how late a hang is found; and a process that gets its turn more rarely than every
second look is not awake in between, so that a starved host has longer."""
EMPTY = StepShape()


class Watchdog:
    """Checks one process from a thread of its own."""

    def __init__(
        self,
        *,
        running_step: Callable[[], RunningStep | None],
        limit_s: Callable[[RunningStep], float],
        call_loop: Callable[[Callable[[], None]], object],
        end: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """`call_loop` runs a function on the event loop, from any thread; `end` ends the process for a reason."""
        self._running_step = running_step
        self._limit_s = limit_s
        self._call_loop = call_loop
        self._end = end
        self._clock = clock
        self._last_s = clock.monotonic()
        self._awake_s = 0.0
        self._beaten_s = 0.0
        self._step: RunningStep | None = None
        self._step_seen_s = 0.0

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
        now_s = self._clock.monotonic()
        self._awake_s += min(now_s - self._last_s, 2 * TICK_S)
        self._last_s = now_s
        step = self._running_step()
        if step is not self._step:
            self._step, self._step_seen_s = step, self._awake_s
        if step is not None and self._awake_s - self._step_seen_s > (limit_s := self._limit_s(step)):
            self._end(f"an engine step has taken more than {limit_s:.0f} s")
        if self._awake_s - self._beaten_s > LOOP_HUNG_S:
            self._end(f"the event loop has not turned for {LOOP_HUNG_S:.0f} s")
        self._call_loop(self._beat)

    def _beat(self) -> None:
        self._beaten_s = self._awake_s


class OverdueWatch:
    """Reports, to one reader of updates, whether the running step is overdue. Event loop only."""

    def __init__(
        self,
        *,
        running_step: Callable[[], RunningStep | None],
        predict_s: Callable[[RunningStep], float | None],
        clock: Clock,
        gap_s: float,
    ) -> None:
        """`predict_s`: duration of a step, None for a kind that was not measured; `gap_s`: usual time between looks."""
        self._running_step = running_step
        self._predict_s = predict_s
        self._clock = clock
        self._gap_s = gap_s
        self._last_s = clock.monotonic()
        self._step: RunningStep | None = None
        self._age_s = 0.0

    def look(self) -> bool:
        """Return whether the running step is overdue; a long time without a look counts as twice the usual one."""
        now_s, step = self._clock.monotonic(), self._running_step()
        awake_s = min(now_s - self._last_s, 2 * self._gap_s)
        self._last_s = now_s
        if step is None:
            self._step = None
            return False
        if step is not self._step:
            self._step, self._age_s = step, 0.0
            awake_s = min(now_s - step.started_s, awake_s)
        self._age_s += awake_s
        predicted_s = self._predict_s(step)
        limit_s = UNMEASURED_OVERDUE_S if predicted_s is None else max(OVERDUE_S, OVERDUE_FACTOR * predicted_s)
        return self._age_s > limit_s


def overdue_watch_of(runtime: WorkerRuntime, *, gap_s: float) -> OverdueWatch:
    """Return a watch over the engine of `runtime` for a reader that looks every `gap_s` seconds."""
    return OverdueWatch(
        running_step=lambda: runtime.engine.running_step,
        predict_s=lambda step: predict_s(step, runtime.timing.model),
        clock=runtime.clock,
        gap_s=gap_s,
    )


def watch_over(runtime: WorkerRuntime) -> None:
    """Start the watchdog of this process, which serves `runtime`. On the event loop."""
    loop = asyncio.get_running_loop()
    watchdog_of(runtime, call_loop=loop.call_soon_threadsafe, end=_end_process, clock=SystemClock()).start()


def watchdog_of(
    runtime: WorkerRuntime,
    *,
    call_loop: Callable[[Callable[[], None]], object],
    end: Callable[[str], None],
    clock: Clock,
) -> Watchdog:
    """Return the watchdog of a process that serves `runtime`, not started; see `Watchdog`."""
    return Watchdog(
        running_step=lambda: runtime.engine.running_step,
        limit_s=lambda step: hung_after_s(step, runtime.timing.model, may_compile=runtime.executor.compiles_steps),
        call_loop=call_loop,
        end=end,
        clock=clock,
    )


def hung_after_s(step: RunningStep, model: TimingModel, *, may_compile: bool) -> float:
    """Return the seconds after which a step hangs; `may_compile`: whether a kind's first steps may compile kernels."""
    predicted_s = predict_s(step, model)
    if predicted_s is None:
        return COMPILING_HUNG_S if may_compile else UNMEASURED_HUNG_S
    return max(HUNG_S, HUNG_FACTOR * predicted_s)


def predict_s(step: RunningStep, model: TimingModel) -> float | None:
    """Return the predicted time of a step and the one in flight before it; None when their kind is not measured."""
    predicted_s = 0.0
    for shape in step.shapes:
        if shape == EMPTY:
            continue
        if not model.kind_of(shape).num_samples:
            return None
        predicted_s += model.step_s(shape)
    return predicted_s


def _end_process(reason: str) -> None:
    logger.critical("this process hangs and is ended: %s", reason)
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(EXIT_HUNG)

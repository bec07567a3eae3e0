"""Notices an engine that hangs: first for the routers, then for good.

An engine step is *overdue* when it takes far longer than predicted. Every update says so, and routers move the answers
of an overdue worker elsewhere while another one can take them. A step that stays overdue ends the process: its
supervisor starts a new one, and the new epoch fences whatever the old one held. Only time that the watch itself was
awake counts, here as in common/watchdog.py.
"""

from collections.abc import Callable

from common.clock import Clock
from common.timing import StepShape, TimingModel
from engine.thread import RunningStep
from worker.runtime import WorkerRuntime

OVERDUE_S, OVERDUE_FACTOR = 1.0, 5.0
"""A step is overdue after this many seconds, or this many times its prediction if that is more."""
HUNG_S, HUNG_FACTOR = 7.0, 20.0
"""A step that takes this long hangs. A supervisor waits as long for a process that does not answer."""
UNMEASURED_OVERDUE_S, UNMEASURED_HUNG_S = 20.0, 120.0
"""The same for steps of a kind that was not measured yet: caches are cold, and the model may be large."""
COMPILING_HUNG_S = 600.0
"""Time after which such a step hangs where it may compile kernels."""
EMPTY = StepShape()


class StepWatch:
    """Notices a step that has taken too long, for the watchdog of the process (common/watchdog.py) or for routers."""

    def __init__(
        self, *, running_step: Callable[[], RunningStep | None], limit_s: Callable[[RunningStep], float], clock: Clock
    ) -> None:
        """`limit_s`: time that a step may take."""
        self._running_step = running_step
        self._limit_s = limit_s
        self._clock = clock
        self._step: RunningStep | None = None
        self._age_s = 0.0

    def look(self, awake_s: float) -> str | None:
        """Return what is wrong with the running step, if anything is; a `common.watchdog.Look`."""
        step = self._running_step()
        if step is None:
            self._step = None
            return None
        if step is not self._step:
            self._step, self._age_s = step, 0.0
            awake_s = min(awake_s, self._clock.monotonic() - step.started_s)
        self._age_s += awake_s
        limit_s = self._limit_s(step)
        return f"an engine step has taken more than {limit_s:.0f} s" if self._age_s > limit_s else None


class OverdueWatch:
    """Reports, to one reader of updates, whether the running step is overdue. Event loop only."""

    def __init__(self, steps: StepWatch, clock: Clock, *, gap_s: float) -> None:
        """`gap_s`: usual time between looks."""
        self._steps = steps
        self._clock = clock
        self._gap_s = gap_s
        self._last_s = clock.monotonic()

    def look(self) -> bool:
        """Return whether the running step is overdue; a long time without a look counts as twice the usual one."""
        now_s = self._clock.monotonic()
        awake_s = min(now_s - self._last_s, 2 * self._gap_s)
        self._last_s = now_s
        return self._steps.look(awake_s) is not None


def step_watch_of(runtime: WorkerRuntime) -> StepWatch:
    """Return a watch for steps of `runtime` that hang."""
    return _watch_of(
        runtime,
        lambda step: hung_after_s(step, runtime.timing.model, may_compile=runtime.executor.compiles_steps),
    )


def overdue_watch_of(runtime: WorkerRuntime, *, gap_s: float) -> OverdueWatch:
    """Return a watch over the engine of `runtime` for a reader that looks every `gap_s` seconds."""
    steps = _watch_of(runtime, lambda step: overdue_after_s(step, runtime.timing.model))
    return OverdueWatch(steps, runtime.clock, gap_s=gap_s)


def _watch_of(runtime: WorkerRuntime, limit_s: Callable[[RunningStep], float]) -> StepWatch:
    return StepWatch(running_step=lambda: runtime.engine.running_step, limit_s=limit_s, clock=runtime.clock)


def overdue_after_s(step: RunningStep, model: TimingModel) -> float:
    """Return the seconds after which a step is overdue."""
    predicted_s = predict_s(step, model)
    return UNMEASURED_OVERDUE_S if predicted_s is None else max(OVERDUE_S, OVERDUE_FACTOR * predicted_s)


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
        if not model.kind_of(shape).is_measured:
            return None
        predicted_s += model.step_s(shape)
    return predicted_s

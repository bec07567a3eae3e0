"""An engine step that hangs is noticed, and no other."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.timing import GUESSED_TIMING, StepModel, StepShape, TimingModel
from common.watchdog import TICK_S
from engine.thread import RunningStep
from tests.clock import ManualClock
from worker.step_watch import (
    COMPILING_HUNG_S,
    HUNG_FACTOR,
    HUNG_S,
    OVERDUE_S,
    UNMEASURED_HUNG_S,
    OverdueWatch,
    StepWatch,
    hung_after_s,
    overdue_after_s,
    predict_s,
)

LIMIT_S = 10.0
DECODE = StepShape(num_decodes=4, num_context_tokens=400)
PREFILL = StepShape(num_prefill_tokens=100)


class Engine:
    """An engine whose steps are predicted to take 10 ms, under the watchdog and under a reader every GAP_S."""

    GAP_S = 0.25

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.step: RunningStep | None = None
        timing = measured(prefill=0.01, decode=0.01)
        self.watch = self._watch(lambda _step: LIMIT_S)
        steps = self._watch(lambda step: overdue_after_s(step, timing))
        self.overdue = OverdueWatch(steps, self.clock, gap_s=self.GAP_S)

    def _watch(self, limit_s: Callable[[RunningStep], float]) -> StepWatch:
        return StepWatch(running_step=lambda: self.step, limit_s=limit_s, clock=self.clock)

    def begin_step(self) -> None:
        self.step = RunningStep((DECODE,), self.clock.monotonic())

    def hangs_after(self, seconds: float) -> str | None:
        """Return the last of many looks of the watchdog."""
        looks = []
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            looks.append(self.watch.look(TICK_S))
        return looks[-1]

    def is_overdue_after(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        return self.overdue.look()


def test_step_that_never_ends_is_a_hang() -> None:
    engine = Engine()
    engine.begin_step()
    assert engine.hangs_after(LIMIT_S) is None
    assert "engine step" in (engine.hangs_after(3) or "")


def test_steps_that_end_are_never_added_up() -> None:
    engine = Engine()
    for _ in range(20):
        engine.begin_step()
        assert engine.hangs_after(LIMIT_S / 2) is None
    engine.step = None
    assert engine.hangs_after(100) is None


def test_step_is_judged_with_the_one_in_flight_before_it() -> None:
    timing = measured(prefill=0.5, decode=0.01)
    assert predict_s(RunningStep((PREFILL, DECODE), 0.0), timing) == pytest.approx(0.51)
    assert predict_s(RunningStep((), 0.0), timing) == 0.0


def test_step_of_a_kind_that_was_never_measured_has_no_prediction() -> None:
    timing = replace(measured(prefill=0.5, decode=0.01), prefill=GUESSED_TIMING.prefill)
    assert predict_s(RunningStep((StepShape(), DECODE), 0.0), timing) == pytest.approx(0.01)
    assert predict_s(RunningStep((PREFILL, DECODE), 0.0), timing) is None


@pytest.mark.parametrize("may_compile", [False, True])
def test_first_step_may_take_minutes_and_longer_only_where_kernels_are_compiled(may_compile: bool) -> None:
    unmeasured = replace(measured(prefill=0.5, decode=0.01), prefill=GUESSED_TIMING.prefill)
    limit_s = hung_after_s(RunningStep((PREFILL,), 0.0), unmeasured, may_compile=may_compile)
    assert limit_s == (COMPILING_HUNG_S if may_compile else UNMEASURED_HUNG_S)
    assert hung_after_s(RunningStep((DECODE,), 0.0), unmeasured, may_compile=may_compile) == HUNG_S
    slow = measured(prefill=3.0, decode=0.01)
    assert hung_after_s(RunningStep((PREFILL,), 0.0), slow, may_compile=may_compile) == pytest.approx(3 * HUNG_FACTOR)


def test_step_is_overdue_when_it_takes_far_longer_than_predicted() -> None:
    engine = Engine()
    engine.begin_step()
    looks = [engine.is_overdue_after(engine.GAP_S) for _ in range(6)]
    assert looks.index(True) == OVERDUE_S / engine.GAP_S
    engine.begin_step()
    assert not engine.is_overdue_after(engine.GAP_S)
    engine.step = None
    assert not engine.is_overdue_after(2 * OVERDUE_S)


def test_step_of_a_process_without_a_core_is_not_overdue() -> None:
    engine = Engine()
    engine.begin_step()
    assert not engine.is_overdue_after(engine.GAP_S)
    assert not engine.is_overdue_after(10 * OVERDUE_S), "the whole process stood still, not its engine"


def measured(*, prefill: float, decode: float) -> TimingModel:
    def flat(seconds: float) -> StepModel:
        return StepModel(constant_s=seconds, num_samples=9)

    return replace(GUESSED_TIMING, prefill=flat(prefill), decode=flat(decode))

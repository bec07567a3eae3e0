"""Durations of steps, with an injected clock that moves while a step computes and between steps."""

from collections.abc import Sequence

import pytest

from common.timing import StepShape
from engine.core import EngineCore
from engine.events import StepSample
from engine.executor import ScheduledSequence, StepHandle, StepResult
from tests.builders import Collector, make_core, make_request, run_until_idle, served, submit
from tests.clock import ManualClock
from tests.engine.overlap import Handle, Spy

STEP_S, HOST_S = 0.5, 0.125


class SlowExecutor:
    """Makes each step of a core take `STEP_S` of a manual clock, from its launch or the end of the previous step."""

    def __init__(self, core: EngineCore, clock: ManualClock) -> None:
        self._launch, self._clock = core.executor.launch, clock
        self._free_at_s = 0.0
        core.executor.launch = self._slow  # type: ignore[method-assign]

    def _slow(self, batch: Sequence[ScheduledSequence]) -> StepHandle:
        self._free_at_s = max(self._free_at_s, self._clock.monotonic()) + STEP_S
        handle, done_s = self._launch(batch), self._free_at_s
        return Handle(lambda: self._wait(handle, done_s), handle.choose)

    def _wait(self, handle: StepHandle, done_s: float) -> list[StepResult]:
        self._clock.advance(max(0.0, done_s - self._clock.monotonic()))
        return handle.results()


def timed_core(max_steps_in_flight: int) -> tuple[EngineCore, ManualClock]:
    clock = ManualClock(100.0)
    core = make_core(max_step_tokens=16, max_steps_in_flight=max_steps_in_flight, clock=clock)
    SlowExecutor(core, clock)
    return core, clock


def run(core: EngineCore, clock: ManualClock) -> tuple[StepSample, ...]:
    """Step to the end; the host takes its time between steps."""
    samples: tuple[StepSample, ...] = ()
    while core.has_work:
        core.step()
        samples += core.report().samples
        clock.advance(HOST_S)
    return samples


@pytest.mark.parametrize(("max_steps_in_flight", "usual_s"), [(1, STEP_S + HOST_S), (2, STEP_S)])
def test_steps_back_to_back_last_from_results_to_results(max_steps_in_flight: int, usual_s: float) -> None:
    core, clock = timed_core(max_steps_in_flight)
    submit(core, make_request(range(10), max_tokens=6, ignore_eos=True))
    samples = run(core, clock)
    assert [sample.seconds for sample in samples] == [STEP_S] + [usual_s] * (len(samples) - 1)
    assert len(samples) == 6


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_idle_time_belongs_to_no_step(max_steps_in_flight: int) -> None:
    core, clock = timed_core(max_steps_in_flight)
    for _ in range(2):
        submit(core, make_request([1], max_tokens=1, ignore_eos=True))
        (sample,) = run(core, clock)
        assert sample.seconds == STEP_S
        clock.advance(1000.0)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_failed_step_and_the_time_until_the_next_are_not_counted(max_steps_in_flight: int) -> None:
    core, clock = timed_core(max_steps_in_flight)
    Spy(core).fail_launch_of = 0
    submit(core, make_request([1]))
    assert run(core, clock) == ()
    clock.advance(1000.0)
    submit(core, make_request([1], max_tokens=1, ignore_eos=True))
    assert [sample.seconds for sample in run(core, clock)] == [STEP_S]


def test_shape_counts_chunks_pairs_and_decodes() -> None:
    core, clock = timed_core(1)
    submit(core, make_request(range(20), max_tokens=3, ignore_eos=True))  # 16 tokens, then 4 more
    shapes = [sample.shape for sample in run(core, clock)]
    assert shapes == [
        StepShape(num_prefill_tokens=16, num_prefill_pairs=16 * 17 // 2),
        StepShape(num_prefill_tokens=4, num_prefill_pairs=17 + 18 + 19 + 20),
        StepShape(num_decodes=1, num_context_tokens=21),
        StepShape(num_decodes=1, num_context_tokens=22),
    ]


def test_shape_of_a_mixed_step_counts_both() -> None:
    core, clock = timed_core(1)
    submit(core, make_request(range(6), max_tokens=3, ignore_eos=True))
    core.step()
    submit(core, make_request(range(100, 105), max_tokens=1, ignore_eos=True))
    core.step()
    assert core.report().samples[-1].shape == StepShape(
        num_prefill_tokens=5, num_prefill_pairs=15, num_decodes=1, num_context_tokens=7
    )
    run(core, clock)


def test_unread_step_samples_do_not_pile_up() -> None:
    core = make_core()
    served(core, make_request([1], max_tokens=200, ignore_eos=True))
    assert 0 < len(core.report().samples) <= 64


def test_waiting_prompt_counts_without_what_the_cache_holds_meanwhile() -> None:
    core = make_core(max_step_tokens=16, max_running=1, num_blocks=64)
    prompt = list(range(32))
    submit(core, make_request(prompt, max_tokens=2, ignore_eos=True))
    second = core.add(make_request([*prompt, 99, 98], max_tokens=2, ignore_eos=True), Collector())
    core.step()
    assert core.load().num_waiting == 1
    pending = [core.load().num_pending_prefill_tokens]
    while core.load().num_waiting:
        core.step()
        pending.append(core.load().num_pending_prefill_tokens)
    assert second is not None
    assert pending[0] >= 34  # all of it: nothing is cached yet
    assert pending[-2] == 2  # while the first one decodes its whole prompt is in the cache
    run_until_idle(core)

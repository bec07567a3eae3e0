"""Steps of a core as tests drive, watch and break them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.ids import RequestId
from engine.core import EngineCore
from engine.executor import Sampled, ScheduledSequence, StepHandle, StepResult
from tests.builders import Collector, expected_tokens, make_core, make_request


@dataclass(frozen=True, slots=True)
class Handle:
    """A `StepHandle` whose results a test decides."""

    results: Callable[[], list[StepResult]]
    choose: Callable[[], None]


class Spy:
    """Stands between a core and its executor: records every batch and injects faults."""

    def __init__(self, core: EngineCore) -> None:
        self.batches: list[list[ScheduledSequence]] = []
        self.taken: list[int] = []
        self.fail_launch_of: int | None = None
        self.fail_results_of: set[int] = set()
        self.fail_choice_of: int | None = None
        self.break_logits_of: set[RequestId] = set()
        """Requests whose logits are not finite."""
        self._launch = core.executor.launch
        core.executor.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: Sequence[ScheduledSequence]) -> StepHandle:
        if self.fail_launch_of == len(self.batches):
            self.fail_launch_of = None
            raise RuntimeError("no launch")
        handle, step_idx = self._launch(batch), len(self.batches)
        self.batches.append(list(batch))
        return Handle(lambda: self._results(handle, step_idx), lambda: self._choose(handle, step_idx))

    def _choose(self, handle: StepHandle, step_idx: int) -> None:
        if self.fail_choice_of == step_idx:
            raise RuntimeError("no choice")
        handle.choose()

    def _results(self, handle: StepHandle, step_idx: int) -> list[StepResult]:
        self.taken.append(step_idx)
        results = handle.results()
        if step_idx in self.fail_results_of:
            raise RuntimeError(f"no results of step {step_idx}")
        for item, result in zip(self.batches[step_idx], results, strict=True):
            if item.sequence.request.request_id in self.break_logits_of:
                result.sampled = [Sampled(token_id=-1) for _ in result.sampled]
        return results


def spied(**limits: Any) -> tuple[EngineCore, Spy]:
    """Return a core over the fake engine and its spy."""
    core = make_core(**limits)
    return core, Spy(core)


def step(core: EngineCore) -> None:
    for group, event in core.step():
        group.sink(event)


def step_until_flight_knows(core: EngineCore, collector: Collector, num_tokens: int) -> None:
    """Step until `num_tokens` tokens have come; the next step is in flight then."""
    while len(collector.outputs) < num_tokens:
        step(core)
    assert core.num_steps_in_flight == 1


def ending_request(**sampling: Any) -> tuple[Any, list[int]]:
    """Return a request that a stop token ends at its fourth token, and these four tokens."""
    free = expected_tokens(make_request([1, 2, 3], max_tokens=30, ignore_eos=True))
    cut = next(i for i in range(3, len(free)) if free[i] not in free[:i])
    request = make_request([1, 2, 3], max_tokens=30, ignore_eos=True, stop_token_ids=frozenset({free[cut]}), **sampling)
    return request, free[: cut + 1]

"""Steps between launch and results, oldest first, and how long they take."""

import logging
from collections import deque
from collections.abc import Sequence

from common.clock import Clock
from engine.events import StepSample
from engine.executor import DeviceBroken, Executor, StepHandle, StepResult
from engine.steps.plan import StepPlan

logger = logging.getLogger(__name__)


class Pipeline:
    """The steps that an executor has in flight, at most `max_steps_in_flight`. Engine thread only."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._steps: deque[tuple[StepPlan, StepHandle]] = deque()

    @property
    def num_steps(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    def launch(self, plan: StepPlan) -> None:
        """Start a step. When the executor raises, the step is not in flight."""
        for source, target in plan.copies:
            self._executor.kv.copy_block(source, target)
        self._steps.append((plan, self._executor.launch(list(plan.batch.values()))))

    @property
    def oldest(self) -> StepPlan:
        """Oldest step in flight."""
        return self._steps[0][0]

    def take(self) -> list[StepResult]:
        """Return the oldest step's results and remove it, also when the executor raises."""
        _plan, handle = self._steps.popleft()
        return handle.results()

    def choose(self) -> None:
        """Let the next step choose what waited for the tokens of the one that was taken. Raises as a launch does."""
        if self._steps:
            self._steps[0][1].choose()

    def abandon(self) -> list[StepPlan]:
        """Wait for all steps, which build on a failed one, and drop their results. Returns them, oldest first.

        Raises DeviceBroken.
        """
        plans: list[StepPlan] = []
        while self._steps:
            plans.append(self.oldest)
            try:
                self.take()
            except DeviceBroken:
                raise
            except Exception:  # its result is lost anyway; it only must not run any more
                logger.warning("a later step failed too", exc_info=True)
        return plans


_MAX_SAMPLES = 64  # a bound for drivers that never call `drain`


class StepTimer:
    """Measures how long the steps of one engine take, without idle time. Engine thread only; O(1) per step.

    A step lasts from the previous step's results to its own: the host's work in between counts, since tokens wait for
    it too, and with two steps in flight no other span belongs to one step alone. After a pause it lasts from its plan.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._samples: deque[StepSample] = deque(maxlen=_MAX_SAMPLES)

    def begin(self) -> None:
        """Start timing before a step is planned."""
        if self._since_s is None:
            self._since_s = self._clock.monotonic()

    def end(self, plan: StepPlan, results: Sequence[StepResult]) -> float | None:
        """Record the oldest step when its results arrive; returns the seconds that it has taken, None after a pause."""
        now_s, since_s = self._clock.monotonic(), self._since_s
        self._since_s = now_s
        if since_s is None:
            return None
        items = zip(plan.batch.values(), results, strict=True) if plan.undrafted is not None else ()
        sample = StepSample(
            shape=plan.shape,
            seconds=now_s - since_s,
            undrafted=plan.undrafted,
            num_accepted=sum(result.num_accepted for item, result in items if item.draft),
        )
        self._samples.append(sample)
        return now_s - since_s

    def pause(self) -> None:
        """Stop timing until the next `begin`: the engine is idle, or a step failed."""
        self._since_s = None

    def drain(self) -> tuple[StepSample, ...]:
        """Return the steps that ended since the last call."""
        if not self._samples:
            return ()
        samples = tuple(self._samples)
        self._samples.clear()
        return samples

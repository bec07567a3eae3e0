"""Steps between launch and results, oldest first, and how long they take."""

import logging
from collections import deque

from common.clock import Clock
from common.timing import StepShape
from engine.events import StepSample
from engine.executor import Executor, StepHandle, StepResult
from engine.scheduler import StepPlan

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
        """Start a step. Raises what the executor raises; the step is not in flight then."""
        for source, target in plan.copies:
            self._executor.kv.copy_block(source, target)
        self._steps.append((plan, self._executor.launch(list(plan.batch.values()))))

    @property
    def oldest(self) -> StepPlan:
        """The step whose results come next."""
        return self._steps[0][0]

    def take(self) -> list[StepResult]:
        """Wait for the oldest step and remove it. Raises what the executor raises; the step is over all the same."""
        _plan, handle = self._steps.popleft()
        return handle.results()

    def abandon(self) -> list[StepPlan]:
        """Wait for all steps and drop their results: they build on one that failed. Returns them, oldest first."""
        plans: list[StepPlan] = []
        while self._steps:
            plans.append(self.oldest)
            try:
                self.take()
            except Exception:  # it is lost anyhow; what matters is that it does not run any more
                logger.warning("a step behind the failed one has failed, too", exc_info=True)
        return plans


_MAX_SAMPLES = 64  # nobody may ask for them


class StepTimer:
    """Stamps the steps of one engine. Engine thread only; O(1) a step.

    Back to back, a step lasts from the results of the one before to its own: what the host does in between counts,
    since tokens wait for that as well, and with two steps in flight it is the only span that belongs to one step alone.
    After a pause it lasts from the moment at which it was planned.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._samples: deque[StepSample] = deque(maxlen=_MAX_SAMPLES)

    def begin(self) -> None:
        """A step is about to be planned."""
        if self._since_s is None:
            self._since_s = self._clock.monotonic()

    def end(self, shape: StepShape) -> None:
        """The results of the oldest step are there."""
        now_s = self._clock.monotonic()
        if self._since_s is not None:
            self._samples.append(StepSample(shape=shape, seconds=now_s - self._since_s))
        self._since_s = now_s

    def pause(self) -> None:
        """Nothing is left to do, or what was done failed: the time until the next `begin` belongs to no step."""
        self._since_s = None

    def drain(self) -> tuple[StepSample, ...]:
        """Return the steps that ended since the last call."""
        if not self._samples:
            return ()
        samples = tuple(self._samples)
        self._samples.clear()
        return samples

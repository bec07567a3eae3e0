"""Steps between launch and results, oldest first."""

import logging
from collections import deque

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

"""What failed steps end: requests, and with several in a row the device."""

import logging
from collections.abc import Sequence as Seq

from common.errors import EngineFault
from common.ids import RequestId
from engine.events import Failed
from engine.executor import DeviceBroken, StepResult
from engine.sequence import Sequence
from engine.steps.group import Emitted, Groups
from engine.steps.plan import StepPlan

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Failed steps in a row, of different requests, after which the device counts as broken. Most errors of CUDA are proof
at once (`engine.device.devices`)."""


class FailedSteps:
    """The failed steps since the last good one. Engine thread only."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._num_in_a_row = 0
        self._requests: set[RequestId] = set()
        """Their requests."""

    def end(self, plans: Seq[StepPlan], error: Exception) -> Emitted:
        """End every request of steps that have failed. Raises DeviceBroken."""
        if isinstance(error, DeviceBroken):
            raise error
        return self._end([sequence for plan in plans for sequence in plan.batch if sequence in self._groups], error)

    def end_not_finite(self, plan: StepPlan, results: Seq[StepResult]) -> Emitted:
        """End the requests whose logits a step left without a finite maximum; none of what it computed is published.

        A step of which nothing else came counts as a failed one. Raises DeviceBroken.
        """
        failed = [sequence for sequence, result in zip(plan.batch, results, strict=True) if result.has_failed]
        if not failed or any(result.sampled and not result.has_failed for result in results):
            self._num_in_a_row = 0
            self._requests.clear()
        living = [sequence for sequence in failed if sequence in self._groups]
        return self._end(living, EngineFault("the model's logits have no finite maximum")) if living else []

    def _end(self, sequences: Seq[Sequence], error: Exception) -> Emitted:
        groups = {self._groups[sequence]: None for sequence in sequences}
        self._num_in_a_row += 1
        self._requests.update(group.request.request_id for group in groups)
        if self._num_in_a_row >= MAX_FAILED_STEPS and len(self._requests) > 1:
            raise DeviceBroken(f"{self._num_in_a_row} steps in a row have failed") from error
        logger.error(
            "engine step failed", exc_info=error, extra={"requests": [group.request.request_id for group in groups]}
        )
        fault = EngineFault(f"engine step failed: {type(error).__name__}: {error}")
        for group in groups:
            self._groups.cancel(group)
        return [(group, Failed(error=fault)) for group in groups]

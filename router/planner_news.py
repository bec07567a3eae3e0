"""What a cluster's controller has told this router of its planner, for operators who watch."""

from common.clock import Clock
from kvrelay.v1 import controller_pb2


class PlannerNews:
    """The latest word of the planner. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: controller_pb2.GetPlanResponse | None = None
        self._told_s = 0.0

    def take(self, told: controller_pb2.GetPlanResponse) -> None:
        """Remember what the controller tells."""
        self._told, self._told_s = told, self._clock.monotonic()

    def latest(self) -> controller_pb2.GetPlanResponse | None:
        """Return it with the ages of this moment; None before the controller has told anything."""
        if self._told is None:
            return None
        found = controller_pb2.GetPlanResponse()
        found.CopyFrom(self._told)
        passed_s = self._clock.monotonic() - self._told_s
        for record in (*((found.latest,) if found.HasField("latest") else ()), *found.changes):
            record.age_s += passed_s
        return found

"""The planner's latest report, which the cluster's controller sends this router, for operators."""

from common.clock import Clock
from kvrelay.v1 import controller_pb2


class PlannerNews:
    """The latest report of the planner. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: controller_pb2.GetPlanResponse | None = None
        self._told_s = 0.0

    def take(self, told: controller_pb2.GetPlanResponse) -> None:
        """Remember the controller's report."""
        self._told, self._told_s = told, self._clock.monotonic()

    def latest(self) -> controller_pb2.GetPlanResponse | None:
        """Return it with the ages of this moment; None before the controller has sent anything."""
        if self._told is None:
            return None
        found = controller_pb2.GetPlanResponse()
        found.CopyFrom(self._told)
        passed_s = self._clock.monotonic() - self._told_s
        for record in (*((found.latest,) if found.HasField("latest") else ()), *found.changes):
            record.age_s += passed_s
        return found

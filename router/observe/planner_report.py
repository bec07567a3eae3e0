"""The planner's latest report to this router, which the controller passes on, for operators who watch."""

from common.clock import Clock
from kvrelay.v1 import controller_pb2


class PlannerReport:
    """The latest report of the planner. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest: controller_pb2.GetPlanResponse | None = None
        self._received_s = 0.0

    def take(self, report: controller_pb2.GetPlanResponse) -> None:
        """Remember a report of the controller."""
        self._latest, self._received_s = report, self._clock.monotonic()

    def latest(self) -> controller_pb2.GetPlanResponse | None:
        """Return it with the ages of this moment; None before the controller has told anything."""
        if self._latest is None:
            return None
        found = controller_pb2.GetPlanResponse()
        found.CopyFrom(self._latest)
        passed_s = self._clock.monotonic() - self._received_s
        for record in (*((found.latest,) if found.HasField("latest") else ()), *found.changes):
            record.age_s += passed_s
        return found

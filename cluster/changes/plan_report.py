"""What the planner did, for people (`kvrelay plan`) and for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.changes.autopilot import Autopilot, PlanNote
from cluster.planner.plan import PoolSizes
from kvrelay.v1 import controller_pb2


def plan_response(autopilot: Autopilot) -> controller_pb2.GetPlanResponse:
    """Return everything that is kept."""
    latest = autopilot.latest
    return controller_pb2.GetPlanResponse(
        mode=autopilot.mode,
        interval_s=autopilot.interval_s,
        latest=None if latest is None else _record(latest, autopilot),
        changes=[_record(note, autopilot) for note in autopilot.changes],
    )


def _record(note: PlanNote, autopilot: Autopilot) -> controller_pb2.PlanRecord:
    wanted, present = note.plan.sizes, note.present
    return controller_pb2.PlanRecord(
        age_s=autopilot.age_s(note),
        prefill=controller_pb2.PoolPlan(present=present.prefill, wanted=wanted.prefill),
        decode=controller_pb2.PoolPlan(present=present.decode, wanted=wanted.decode),
        reason=note.plan.reason,
        terms=[controller_pb2.PlanTerm(name=name, value=value) for name, value in note.plan.terms],
        outcome=note.outcome,
    )


class PlanGauges:
    """Prometheus metrics of the planner; see docs/metrics.md. A scrape reads them from a thread of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._present = Gauge(
            "kvrelay_pool_workers_present", "Workers that serve or start", ["pool"], registry=self.registry
        )
        self._wanted = Gauge(
            "kvrelay_pool_workers_wanted", "Workers that the planner wants", ["pool"], registry=self.registry
        )
        self._changes = Counter(
            "kvrelay_planner_changes", "Changes that were carried out, or failed", ["outcome"], registry=self.registry
        )

    def set_sizes(self, *, present: PoolSizes, wanted: PoolSizes) -> None:
        """See Gauges."""
        for gauge, sizes in ((self._present, present), (self._wanted, wanted)):
            gauge.labels("prefill").set(sizes.prefill)
            gauge.labels("decode").set(sizes.decode)

    def count_change(self, outcome: str) -> None:
        """See Gauges."""
        self._changes.labels(outcome).inc()

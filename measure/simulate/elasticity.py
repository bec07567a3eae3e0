"""What a simulation with changing pools is given, and what it tells of them."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.planner.observation import Pool
from cluster.planner.plan import Planner, PoolSizes, ScalingPlan
from common.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """Who decides about the pools' sizes, and how long changes take."""

    make_planner: Callable[[], Planner]
    """Planners keep what they need of the past: every run has one of its own."""
    slo: Slo | None = None
    """By which the routers tell the planner what was good. None: everything that was answered."""
    interval_s: float = 15.0
    """Between two plans."""
    demand_window_s: float = 60.0
    """What the routers report is of so long."""
    startup_s: float = 120.0
    """From asking for a worker to its first request: a machine, the process, 140 GB of weights."""
    flip_s: float | None = 2.0
    """From an empty worker of one pool to a serving one of the other; None: workers never change their pool."""
    grace_s: float = 120.0
    """A worker that is not empty so long after it was told to go is stopped; what runs there goes on elsewhere."""


@dataclass(slots=True, kw_only=True)
class Stay:
    """One worker's time in a pool. Times since the first arrival; those of the first workers begin at 0."""

    worker_id: str
    pool: Pool
    asked_s: float
    """From when on it is paid for."""
    serving_s: float | None = None
    leaving_s: float | None = None
    """When it was told to go; None: it never was."""
    gone_s: float | None = None
    is_flipped: bool = False
    """It had served the other pool before. Its time there ended when this one began."""

    def paid_s(self, *, until_s: float) -> float:
        """Return for how long it was paid up to some time: while it started, served, and drained."""
        end_s = until_s if self.gone_s is None else min(self.gone_s, until_s)
        return max(0.0, end_s - self.asked_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNote:
    """What a planner said."""

    at_s: float
    before: PoolSizes
    """Starting workers included, draining ones not."""
    plan: ScalingPlan

    @property
    def is_change(self) -> bool:
        """Whether it asked for other sizes."""
        return self.plan.sizes != self.before

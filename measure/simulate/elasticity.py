"""Input and output of a simulation with changing pools."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.planner.plan import Planner, Pool, PoolSizes, ScalingPlan
from common.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """Planner of the pools' sizes, and times of changes."""

    make_planner: Callable[[], Planner]
    """Makes the planner of a run. Planners are stateful, so every run needs its own."""
    slo: Slo | None = None
    """Objectives by which routers report good requests to the planner; None: all complete requests are good."""
    interval_s: float = 15.0
    """Time between two plans."""
    demand_window_s: float = 60.0
    """Time that a report of the routers covers."""
    startup_s: float = 120.0
    """Time from asking for a worker to its first request: machine, process, 140 GB of weights."""
    flip_s: float | None = 2.0
    """Time in which an empty worker changes its pool; None: workers never do."""
    grace_s: float = 120.0
    """Time after which a leaving worker that is not empty is stopped; its requests go on elsewhere."""


@dataclass(slots=True, kw_only=True)
class Stay:
    """One worker's time in a pool. Times since the first arrival; those of the initial workers begin at 0."""

    worker_id: str
    pool: Pool
    asked_s: float
    """Time from which it is paid for."""
    serving_s: float | None = None
    leaving_s: float | None = None
    """Time at which it was told to leave; None: never."""
    gone_s: float | None = None
    is_flipped: bool = False
    """Whether it served the other pool before; its time there ended when this one began."""

    def paid_s(self, *, until_s: float) -> float:
        """Return the paid time up to `until_s`: starting, serving and draining."""
        end_s = until_s if self.gone_s is None else min(self.gone_s, until_s)
        return max(0.0, end_s - self.asked_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNote:
    """A plan of the planner."""

    at_s: float
    before: PoolSizes
    """Sizes before the plan, with starting workers, without draining ones."""
    plan: ScalingPlan

    @property
    def is_change(self) -> bool:
        """Whether the plan asks for other sizes."""
        return self.plan.sizes != self.before

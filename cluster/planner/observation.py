"""A planner's observation, made by the controller from the routers' reports, or by the simulator."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from common.demand import Demand
from common.ids import WorkerId
from common.timing import TimingModel


class Pool(StrEnum):
    """A pool."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerPhase(StrEnum):
    """A worker's phase as it matters for capacity."""

    STARTING = "starting"
    """Paid for, not serving yet."""
    SERVING = "serving"
    DRAINING = "draining"
    """Paid for, takes nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """One worker."""

    worker_id: WorkerId
    pool: Pool
    phase: WorkerPhase
    timing: TimingModel | None
    """Fitted to its own steps; None before it serves."""
    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    num_context_tokens: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    max_running: int | None = None
    """Sequences in one step; None: no limit is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The input of a plan."""

    now_s: float
    """The controller's monotonic clock."""
    demand: Demand
    workers: tuple[ObservedWorker, ...]
    startup_s: Mapping[Pool, float]
    """Measured time from the request for a worker to its use, by pool."""
    drain_s: Mapping[Pool, float]
    """Measured time from the order to drain to the end, by pool."""

    def count(self, pool: Pool, *phases: WorkerPhase) -> int:
        """Return the workers of a pool in these phases."""
        return sum(worker.pool is pool and worker.phase in phases for worker in self.workers)

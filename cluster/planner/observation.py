"""What a planner is told. Made by the controller from the routers' reports, or by the simulator from its routers."""

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
    """Where a worker is in its life, as far as capacity goes."""

    STARTING = "starting"
    """Paid for, does not serve yet."""
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
    """What it has fitted to its own steps; None before it serves."""
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
    """Everything that a plan is made of."""

    now_s: float
    """The controller's monotonic clock."""
    demand: Demand
    workers: tuple[ObservedWorker, ...]
    startup_s: Mapping[Pool, float]
    """Measured: asked for to first request, by pool."""
    drain_s: Mapping[Pool, float]
    """Measured: told to go to gone."""

    def count(self, pool: Pool, *phases: WorkerPhase) -> int:
        """Return the workers of a pool in these phases."""
        return sum(worker.pool is pool and worker.phase in phases for worker in self.workers)

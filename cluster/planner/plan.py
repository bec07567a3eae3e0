"""The interface of a planner: the observation, from the controller or the simulator, and the answer with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Workers in each pool, including starting and excluding draining ones."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """A planner's answer. Where one pool shrinks and the other grows, workers flip first."""

    sizes: PoolSizes
    reason: str
    """For people: the observation, the conclusion, and what delays a change."""
    terms: tuple[tuple[str, float], ...] = ()
    """Names and values of the underlying numbers, in reading order."""


class Planner(Protocol):
    """Decides pool sizes. Keeps the history it needs; time comes only from observations."""

    def plan(self, observed: Observation) -> ScalingPlan:
        """Return the sizes that the pools should have now. Called at a steady interval. Never raises."""
        ...

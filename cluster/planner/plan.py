"""The interface of a planner: its settings, the observation by the controller or the simulator, and the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from common.demand import Demand
from common.ids import WorkerId
from common.slo import Slo
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
    num_tier_blocks: int = 0
    max_tier_blocks: int = 0
    """Most blocks in its tiers; 0: it has none."""
    block_bytes: int = 0


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

    @property
    def sizes(self) -> "PoolSizes":
        """The pools' sizes, without draining workers."""
        prefill, decode = (self.count(pool, WorkerPhase.STARTING, WorkerPhase.SERVING) for pool in Pool)
        return PoolSizes(prefill=prefill, decode=decode)


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
    """Sentence for operators: the observation, the conclusion, and what delays a change."""
    terms: tuple[tuple[str, float], ...] = ()
    """Names and values of the underlying numbers, in reading order."""


class Planner(Protocol):
    """Decides pool sizes. Keeps the history it needs; time comes only from observations."""

    def plan(self, observed: Observation) -> ScalingPlan:
        """Return the sizes that the pools should have now. Called at a steady interval. Never raises."""
        ...


DECODE_HELP = 0.75
"""Value for policies that let decode workers compute prompts. It explains the attainment of twelve fixed splits in a
replay of production traffic under `predictive` (`benchmarks/results/planner.md`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Limits of one pool's size."""

    smallest: int = 1
    largest: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.smallest <= self.largest:
            raise ValueError(f"smallest {self.smallest} and largest {self.largest} must be 0 <= smallest <= largest")

    def clamp(self, size: int) -> int:
        """Return the nearest allowed size."""
        return min(max(size, self.smallest), self.largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Objectives, limits and patience."""

    slo: Slo
    attainment: float = 0.9
    """Share of requests that should meet both objectives, among those that could on an idle cluster."""
    prefill: PoolLimits = field(default_factory=PoolLimits)
    decode: PoolLimits = field(default_factory=PoolLimits)
    max_workers: int = 128
    """Limit for both pools together."""
    max_utilization: float = 0.85
    """Limit for a prefill worker's time; the rest is for load that the forecast misses."""
    decode_help: float = DECODE_HELP
    """Share of decode workers' spare time in which they compute prompts; 0 if the routers' policy never allows that."""
    slack_to_shrink: float = 0.1
    """Hysteresis: a pool shrinks only if it would carry this share more than the expected load."""
    interval_s: float = 10.0
    """Time between two plans."""
    stable_s: float = 60.0
    """Time for which a smaller pool must have been enough before a pool shrinks; at least a start plus a drain."""
    cooldown_s: float = 30.0
    """Time without a change of sizes before a pool shrinks."""
    growth: float = 0.5
    """Largest growth in one plan, as a share of the pool's size; two workers are always allowed."""
    memory_s: float = 300.0
    """Time for which arrival rates and shapes of requests are remembered."""
    backlog_drain_s: float = 60.0
    """Time in which an overlong line should be worked off."""
    min_shapes: int = 8
    """Finished requests required for a plan."""

    def __post_init__(self) -> None:
        if not 0.0 < self.attainment < 1.0:
            raise ValueError(f"attainment is {self.attainment}; it must be between 0 and 1, both excluded")
        if not 0.0 < self.max_utilization < 1.0:
            raise ValueError(f"max_utilization is {self.max_utilization}; it must be between 0 and 1, both excluded")
        if not 0.0 <= self.decode_help <= 1.0:
            raise ValueError(f"decode_help is {self.decode_help}; it must be between 0 and 1")
        if self.max_workers < self.prefill.smallest + self.decode.smallest:
            raise ValueError(f"max_workers {self.max_workers} is less than both pools' smallest sizes")

    def limits(self, pool: Pool) -> PoolLimits:
        """Return the limits of a pool."""
        return self.prefill if pool is Pool.PREFILL else self.decode

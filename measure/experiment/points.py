"""Points, the measurements of an experiment: one for each arm, load and repeat, real or simulated."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from measure.figures import ALL, Figures


class Source(enum.StrEnum):
    """Origin of a point."""

    REAL = "real"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of serving the workload."""

    name: str
    """"1P1D", "2 aggregated", "vllm" …"""
    num_prefill: int
    """0: aggregated. Every worker is a decode worker that computes its prompts itself."""
    num_decode: int
    settings: dict[str, str] = field(default_factory=dict)
    """Other differences between arms: policy, chunk budget, transport …; `threads` of each worker, if stated."""
    is_external: bool = False
    """Whether the experiment did not configure the server, such as another system's."""

    @property
    def num_workers(self) -> int:
        """Workers of both kinds."""
        return self.num_prefill + self.num_decode

    @property
    def num_threads(self) -> int | None:
        """CPU threads of all workers; None: not stated."""
        threads = self.settings.get("threads", "")
        return int(threads) * self.num_workers if threads.isdecimal() else None

    def equals(self, other: "Arm") -> bool:
        """Return whether two arms have as many workers, or as many threads in total."""
        same_threads = self.num_threads is not None and self.num_threads == other.num_threads
        return self.num_workers == other.num_workers or same_threads

    def num_units(self, unit: "MeanUnit") -> int:
        """Return the number of units of the arm; at least 1."""
        count = self.num_threads if unit is MeanUnit.THREAD else self.num_workers
        return max(1, count or self.num_workers)


class MeanUnit(enum.StrEnum):
    """Unit by which arms of different size are compared."""

    WORKER = "worker"
    THREAD = "thread"

    @classmethod
    def of(cls, arms: Iterable[Arm]) -> "MeanUnit":
        """Return THREAD if all arms state their threads and their workers differ in it, else WORKER."""
        counts = {None if arm.num_threads is None else arm.num_threads / arm.num_workers for arm in arms}
        return cls.THREAD if None not in counts and len(counts) > 1 else cls.WORKER


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Measurements of one run."""

    arm: Arm
    source: Source
    load: float
    """Mean requests per second of the workload."""
    repeat: int
    duration_s: float
    """Time in which counted requests arrived, without warm-up."""
    kinds: dict[str, Figures]
    """Figures of `ALL` requests first, then of each kind."""
    output_tokens_per_s: float
    token_hit: float | None
    """Cached prompt tokens of all prompt tokens; None if unknown."""
    prefill_busy: float | None
    """Share of the time in which the prefill pool computed; None without a pool, or if unknown."""
    decode_busy: float | None
    kv_peak: float | None
    """Largest share of pages in use on any worker."""
    transfer_bytes: int
    transfer_exposed_p50_s: float | None
    warnings: tuple[str, ...] = ()
    """Reasons not to trust the point, in words."""

    @property
    def overall(self) -> Figures:
        """Figures of all requests."""
        return self.kinds[ALL]

    @property
    def goodput_per_s(self) -> float:
        """Good requests per second."""
        return self.overall.num_good / self.duration_s if self.duration_s else 0.0

    @property
    def goodput_per_worker(self) -> float:
        """Good requests per second and worker of either kind."""
        return self.goodput_per_s / max(1, self.arm.num_workers)

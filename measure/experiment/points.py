"""What an experiment measures: one point for each arm, load and repeat, real or simulated."""

import enum
from dataclasses import dataclass, field


class Source(enum.StrEnum):
    """Where a point comes from."""

    REAL = "real"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of serving the workload."""

    name: str
    """"1P1D", "2 aggregated", "vllm" …"""
    num_prefill: int
    """0: aggregated; every worker is a decode worker that computes its prompts itself."""
    num_decode: int
    settings: dict[str, str] = field(default_factory=dict)
    """What else differs between arms: policy, chunk budget, transport …; `threads` of each worker, where it is said."""
    is_external: bool = False
    """A server that the experiment did not configure, such as another system's."""

    @property
    def num_workers(self) -> int:
        """Workers of both kinds."""
        return self.num_prefill + self.num_decode

    @property
    def num_threads(self) -> int | None:
        """CPU threads of all workers; None: not said."""
        threads = self.settings.get("threads", "")
        return int(threads) * self.num_workers if threads.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles of a time in seconds, of complete requests."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPoint:
    """What one kind of session got. Kind "all": everybody."""

    kind: str
    num_requests: int
    num_good: int
    """Answered to their ends within both objectives."""
    num_refused: int
    """Refused, failed, timed out or cancelled."""
    num_ttft_misses: int
    """Complete, but the first token came late."""
    num_itl_misses: int
    """Complete, but the mean gap was too long."""
    ttft: Latency | None
    itl: Latency | None
    """Gaps between tokens, or what comes nearest to it."""
    tpot: Latency | None
    """The requests' mean gaps."""
    e2e: Latency | None

    @property
    def good_share(self) -> float:
        """Good requests of all."""
        return self.num_good / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run."""

    arm: Arm
    source: Source
    load: float
    """Requests per second of the workload, in the mean."""
    repeat: int
    duration_s: float
    """In which requests arrived, warm-up apart."""
    kinds: tuple[KindPoint, ...]
    """"all" first."""
    output_tokens_per_s: float
    token_hit: float | None
    """Cached prompt tokens of all, where it is known."""
    prefill_busy: float | None
    """Share of the time in which the prefill pool computed; None without a pool, or when it is not known."""
    decode_busy: float | None
    kv_peak: float | None
    """Largest share of pages in use on any worker."""
    transfer_bytes: int
    transfer_exposed_p50_s: float | None
    warnings: tuple[str, ...] = ()
    """Why the point cannot be trusted, in words."""

    @property
    def overall(self) -> KindPoint:
        """What everybody got."""
        return self.kinds[0]

    @property
    def goodput_per_s(self) -> float:
        """Good requests per second."""
        return self.overall.num_good / self.duration_s if self.duration_s else 0.0

    @property
    def goodput_per_worker(self) -> float:
        """The same by workers of both kinds."""
        return self.goodput_per_s / max(1, self.arm.num_workers)

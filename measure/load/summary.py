"""Figures of a load test, as tables, reports and experiments show them. Times in seconds.

Latencies are those of complete requests, counted from when a request was due. Refusals, failures, timeouts and
cancellations have none; they count in goodput, as not good.
"""

from dataclasses import dataclass, field

from common.slo import Slo
from measure.figures import Counts
from measure.load.estimates import Estimate, MeasuredDistribution
from measure.load.records import RunInfo
from measure.load.session_figures import SessionFigures
from measure.load.window import Steadiness, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Distributions over the complete requests of a kind; None where there are no values."""

    ttft: MeasuredDistribution | None
    """From due to first token."""
    itl: MeasuredDistribution | None
    """Gaps between pieces of the answer; a piece may hold several tokens."""
    tpot: MeasuredDistribution | None
    e2e: MeasuredDistribution | None
    """From due to end."""
    queue: MeasuredDistribution | None
    """Queue times by the server's own stamps, like the three figures below."""
    prefill: MeasuredDistribution | None
    transfer: MeasuredDistribution | None
    """Over requests whose KV moved; the next one, too."""
    transfer_exposed: MeasuredDistribution | None
    lag: MeasuredDistribution | None
    """From due to sent: the generator's own delay, which the latencies above contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Prompt tokens found in caches, over requests whose server reports them."""

    hit_share: Estimate
    pulled_share: float
    """Share of the prompt tokens that came from another worker's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Error of the router's forecast of TTFT: its own measurement minus the forecast."""

    num_requests: int
    median_s: float
    """Above 0: later than forecast."""
    p90_abs_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSummary(Counts):
    """Figures of one kind of session; the kind "all" stands for all of them."""

    kind: str
    num_refused: int
    num_failed: int
    num_timed_out: int
    num_cancelled: int
    good_share: Estimate
    """Share of good requests, with Wilson's interval, widened by the correlation of neighbouring requests."""
    goodput_per_s: Estimate
    """Good requests per second, given these arrivals."""
    latencies: Latencies
    mean_prompt_tokens: float
    mean_output_tokens: float
    """Mean over complete requests, as received."""
    tokens_per_piece: float | None
    """Above 1, ITL is not the gap between tokens; compare TPOT."""
    cache: CacheUse | None
    num_replans: int
    """Attempts beyond each request's first."""
    num_transfers: int
    transfer_bytes: int
    prediction: PredictionError | None

    @property
    def bytes_per_transfer(self) -> float | None:
        """Mean over requests with a transfer; None without any."""
        return self.transfer_bytes / self.num_transfers if self.num_transfers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates within the window, also of requests that were due before it."""

    offered_per_s: float
    completed_per_s: float
    prompt_tokens_per_s: float
    """Tokens of prompts whose first output token came; cached tokens count."""
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """One worker, or a pool of them, within the window."""

    name: str
    role: str
    num_workers: int
    computed_tokens_per_s: float | None
    """Prompt tokens; None without two samples."""
    output_tokens_per_s: float
    """Output tokens of requests that it decoded, by the report at their ends."""
    num_prefilled: int
    """Counted requests whose prompt it computed for another worker."""
    num_decoded: int
    busy: float | None
    """Share of the time that its engine spent in steps; for a pool the mean over its workers."""
    mean_running: float | None
    mean_waiting: float | None
    mean_kv: float | None
    """Share of pages in use."""
    peak_kv: float | None
    """Largest share on any worker."""

    @property
    def output_tokens_per_worker_s(self) -> float:
        """Tokens per second and worker."""
        return self.output_tokens_per_s / self.num_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """Requests that ended in the same way."""

    outcome: str
    error: str
    """Class and message of the first of them; those of the others may differ in ids and numbers."""
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All figures of a load test: functions of its records, the objectives and the window."""

    info: RunInfo
    slo: Slo
    window: Window
    kinds: tuple[KindSummary, ...]
    """"all" first, then by name."""
    throughput: Throughput
    pools: tuple[WorkerSummary, ...]
    """Figures of the workers by role; empty when the target does not report them."""
    workers: tuple[WorkerSummary, ...]
    peak_queued: int | None
    """Longest queue of the router in any sample."""
    failures: tuple[FailureCount, ...]
    """Most frequent first."""
    steadiness: Steadiness
    sessions: SessionFigures | None = None
    """None without sessions of several requests."""
    warnings: tuple[str, ...] = field(default=())
    """Reasons not to trust the numbers, and limits of their meaning, in words."""

    @property
    def overall(self) -> KindSummary:
        """Figures of all requests."""
        return self.kinds[0]

    @property
    def distinct_kinds(self) -> tuple[KindSummary, ...]:
        """Kinds to show; with a single kind only "all", since both are the same."""
        return self.kinds if len(self.kinds) > 2 else self.kinds[:1]

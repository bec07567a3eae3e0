"""What a load test found: the numbers that tables, reports and experiments show. Times in seconds.

Latencies are those of complete requests, counted from when a request was due. Refusals, failures, timeouts and
cancellations have none; they count in goodput, as not good.
"""

from dataclasses import dataclass, field

from common.slo import Slo
from measure.load.estimates import Distribution, Estimate
from measure.load.records import RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which requests were counted: those that were due in it."""

    start_s: float
    """End of the warm-up."""
    end_s: float
    """When the last counted request was due."""
    rates_end_s: float
    """Rates count until here: `end_s`, or the last answer where the arrivals were shorter than the answers."""
    num_counted: int
    num_before: int
    """Left out as warm-up."""
    num_after: int
    """Left out as cool-down."""
    rule: str
    """How the window was found, in words."""

    @property
    def duration_s(self) -> float:
        """What rates are divided by."""
        return self.rates_end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Distributions over the complete requests of a kind; None where nobody says."""

    ttft: Distribution | None
    """Due to first token."""
    itl: Distribution | None
    """Gaps between pieces of the answer; a piece may hold several tokens."""
    tpot: Distribution | None
    """A request's mean gap between tokens."""
    e2e: Distribution | None
    """Due to end."""
    queue: Distribution | None
    """The server's own stamp, as the three below."""
    prefill: Distribution | None
    transfer: Distribution | None
    """Of requests whose KV moved; so the next."""
    transfer_exposed: Distribution | None
    lag: Distribution | None
    """Due to sent: the generator's own delay, which the latencies above contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """What was found instead of computed, over requests whose server says."""

    hit_share: Estimate
    """Cached prompt tokens of all prompt tokens."""
    pulled_share: float
    """Those of them that came from another worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """How well the router foresaw the first token: its own measure less its forecast."""

    num_requests: int
    median_s: float
    """Above 0: later than foreseen."""
    p90_abs_s: float
    """Nine of ten forecasts were not further off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSummary:
    """What one kind of session got. Kind "all": everybody."""

    kind: str
    num_requests: int
    num_complete: int
    num_refused: int
    num_failed: int
    num_timed_out: int
    num_cancelled: int
    num_good: int
    """Answered to their ends within both objectives."""
    num_ttft_misses: int
    """Complete, but the first token came late."""
    num_itl_misses: int
    """Complete, but the mean gap was too long. A request can miss both."""
    good_share: Estimate
    """Good requests of all: Wilson's interval, widened by how much requests resemble their neighbours."""
    goodput_per_s: Estimate
    """Good requests per second, given these arrivals."""
    latencies: Latencies
    mean_prompt_tokens: float
    mean_output_tokens: float
    """Of complete requests, as came."""
    tokens_per_piece: float | None
    """Above 1, ITL is not the gap between tokens: compare TPOT."""
    cache: CacheUse | None
    num_replans: int
    """Attempts beyond each request's first."""
    num_transfers: int
    """Requests whose KV moved between workers."""
    transfer_bytes: int
    prediction: PredictionError | None

    @property
    def num_not_complete(self) -> int:
        """Refused, failed, timed out or cancelled."""
        return self.num_requests - self.num_complete

    @property
    def bytes_per_transfer(self) -> float | None:
        """Mean of those that had one."""
        return self.transfer_bytes / self.num_transfers if self.num_transfers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What passed within the window, whenever it had been asked for."""

    offered_per_s: float
    """Requests that were due."""
    completed_per_s: float
    prompt_tokens_per_s: float
    """Prompts whose first token came; cached tokens count."""
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """One worker within the window, or a pool of them."""

    name: str
    role: str
    num_workers: int
    computed_tokens_per_s: float | None
    """Prompt tokens; None without two samples."""
    output_tokens_per_s: float
    """Of requests that it decoded, by the end's report."""
    num_prefilled: int
    """Counted requests whose prompt it computed for another worker."""
    num_decoded: int
    busy: float | None
    """Share of the time that its engine spent in steps; the mean of a pool's workers."""
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
    """Class and message of the first of them; others may differ in ids and numbers."""
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """Whether the system kept up: last third of the window against its first."""

    is_steady: bool
    backlog_early: float
    """Requests due and not ended, in the mean over the first third."""
    backlog_late: float
    e2e_growth: Estimate | None
    """Median E2E of the last third by that of the first; None with too few requests."""
    arrival_growth: float
    """Arrivals of the last third by those of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A load test in numbers, all of them functions of its records and the three choices below."""

    info: RunInfo
    slo: Slo
    window: Window
    kinds: tuple[KindSummary, ...]
    """"all" first, then by name."""
    throughput: Throughput
    pools: tuple[WorkerSummary, ...]
    """By role; empty when the target does not tell."""
    workers: tuple[WorkerSummary, ...]
    peak_queued: int | None
    """Most requests in the router's line, of those sampled."""
    failures: tuple[FailureCount, ...]
    """Most frequent first."""
    steadiness: Steadiness
    warnings: tuple[str, ...] = field(default=())
    """Why the numbers should not be trusted, or what they do not mean, in words."""

    @property
    def overall(self) -> KindSummary:
        """What everybody got."""
        return self.kinds[0]

    def pool(self, role: str) -> WorkerSummary | None:
        """Return a pool by its role; None when the target has none, or does not tell."""
        return next((pool for pool in self.pools if pool.role == role), None)

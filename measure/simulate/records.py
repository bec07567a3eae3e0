"""What goes into a simulation and what comes out of it."""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.config import RouterConfig
from common.timing import TimingModel
from measure.simulate.elasticity import Elasticity, PlanNote, Stay
from measure.simulate.timing import StepTimes
from router.tenants import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Workers, their pages and their limits."""

    num_prefill: int
    """0: aggregated; every worker is a decode worker that computes its prompts itself."""
    num_decode: int
    num_routers: int = 1
    """Side by side; requests are dealt to them in turn."""
    num_blocks: int = 3000
    """KV pages of each worker."""
    block_size: int = 512
    """Tokens of a page."""
    block_bytes: int = 512 * 327_680
    """KV of one page; by default of a 70B model with 8 KV heads of 128, 80 layers, 2 bytes."""
    max_step_tokens: int = 8192
    decode_step_tokens: int | None = None
    """Of decode workers, and so of aggregated ones; None: the same."""
    max_running: int = 256
    max_waiting: int = 4096
    max_model_len: int = 1 << 20

    @property
    def num_workers(self) -> int:
        """Workers of both kinds."""
        return self.num_prefill + self.num_decode

    @staticmethod
    def parse_workers(text: str) -> tuple[int, int]:
        """Return (prefill, decode) of "4P4D", or of "8" for eight aggregated workers. Raises ValueError."""
        match = re.fullmatch(r"(?:(\d+)P)?(\d+)D?", text.strip().upper())
        if match is None or int(match[2]) < 1:
            raise ValueError(f"{text!r} names no workers; say 4P4D, or 8 for eight workers without disaggregation")
        return int(match[1] or 0), int(match[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """What messages and KV bytes take."""

    latency_s: float = 0.0005
    """Of every message, one way."""
    kv_bytes_per_s: float = 50e9
    """Of each worker's link, each way; transfers that share a link queue there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """Everything else that a run depends on. Same shape, settings and arrivals: same results, byte for byte."""

    prefill_times: StepTimes
    """Of prefill workers."""
    decode_times: StepTimes
    """Of decode workers, and so of aggregated ones."""
    prefill_timing: TimingModel | None = None
    """What prefill workers report of themselves. None: what they fit to their own steps."""
    decode_timing: TimingModel | None = None
    """The same of decode workers."""
    network: NetworkShape = field(default_factory=NetworkShape)
    router: RouterConfig = field(default_factory=RouterConfig)
    """Names the policy."""
    policy: str | None = None
    """Policy in place of that one; may be one that only simulations have."""
    report_interval_s: float = 0.1
    """Workers tell routers of load and KV events at most so often."""
    event_lag_s: float = 0.0
    """Reports take so much longer than other messages."""
    ttft_slo_s: float = float("inf")
    itl_slo_s: float = float("inf")
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """By the name that arrivals give; any other one is anybody."""
    timeout_s: float = 3600.0
    """Deadline of each request."""
    sample_interval_s: float | None = None
    """How often the workers' load is noted. None: never."""
    elasticity: Elasticity | None = None
    """Who changes the pools while the workload runs. None: nobody does."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a workload."""

    at_s: float
    """When it comes; arrivals are in order of that."""
    prompt: "array[int]"
    """Token ids, typecode "I"."""
    num_output_tokens: int
    """What the model will answer, whatever it is allowed to. At least 1."""
    max_tokens: int | None = None
    """What the request allows, which is all that a router knows; None: exactly `num_output_tokens`."""
    answer: "array[int] | None" = None
    """Token ids that the model will say, `num_output_tokens` of them: so the next turn of a chat finds them cached.
    None: nobody will ask for them."""
    tenant: str = ""
    priority: int = 0
    ttft_slo_s: float | None = None
    """What the client asked for; None: the run's."""
    kind: str = ""
    """Results are told apart by it."""
    follow_up: "Callable[[RequestResult], Arrival | None] | None" = None
    """Called once it has ended, however that was. Returns what comes because of it, at its end or later, or None."""


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """What became of one arrival. Times are of the virtual clock, as the client sees them."""

    index: int
    """In the order of arrival."""
    arrival_s: float
    num_prompt_tokens: int
    tenant: str = ""
    first_token_s: float | None = None
    end_s: float | None = None
    """Of the last token, or of the refusal."""
    num_output_tokens: int = 0
    gap_sum_s: float = 0.0
    """Last token minus first token, by the engines' own stamps: exact, however messages are bundled."""
    gap_max_s: float = 0.0
    num_cached_tokens: int = 0
    """Prompt tokens that the computing worker did not compute, pulled ones included."""
    num_pulled_tokens: int = 0
    num_decode_cached_tokens: int = 0
    """Prompt tokens that the decode worker of a remote plan held already."""
    predicted_cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    predicted_itl_s: float | None = None
    prefill_worker: str = ""
    """Empty: the plan was local."""
    decode_worker: str = ""
    transfer_bytes: int = 0
    transfer_exposed_s: float = 0.0
    num_attempts: int = 0
    refusal: str = ""
    """Error class and message; empty after a complete answer."""
    kind: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every token came."""
        return self.end_s is not None and not self.refusal

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens; None with fewer than two."""
        return self.gap_sum_s / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    @property
    def e2e_s(self) -> float | None:
        """Arrival to end."""
        return None if self.end_s is None else self.end_s - self.arrival_s


@dataclass(slots=True, kw_only=True)
class WorkerResult:
    """One worker's counters at its end, or at that of the run."""

    worker_id: str
    """prefill-0 …, decode-0 …"""
    num_steps: int
    busy_s: float
    """Virtual time in steps."""
    num_cached_tokens: int
    num_computed_tokens: int
    """Of prompts."""
    num_preemptions: int
    num_requests: int
    kv_bytes_sent: int
    kv_bytes_received: int

    @property
    def is_prefill(self) -> bool:
        """Whether it belongs to the prefill pool."""
        return self.worker_id.startswith("prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """All workers at one moment, in the order of `SimRun.workers`."""

    at_s: float
    busy_s: tuple[float, ...]
    """Time in steps since the beginning, that of the running one included."""
    used_share: tuple[float, ...]
    """Pages referenced or reserved, of all."""


@dataclass(slots=True, kw_only=True)
class SimRun:
    """A finished run. All but `wall_s` and `choice_s` are functions of what went in."""

    results: list[RequestResult]
    """In order of arrival."""
    workers: list[WorkerResult]
    gaps: Sequence[tuple[float, int]]
    """Gaps between tokens of all requests: (upper bound of a 2 % wide bin in seconds, count), ascending."""
    kind_gaps: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    """The same of each kind."""
    samples: Sequence[LoadSample] = ()
    stays: Sequence[Stay] = ()
    """Every worker's time in a pool, in order of asking for it."""
    plans: Sequence[PlanNote] = ()
    """What the planner said, where there was one."""
    num_moves: int = 0
    """Answers that went on on another worker because theirs was to go."""
    end_s: float
    """Virtual time when the last request had ended."""
    wall_s: float
    """Real time that the run took."""
    choice_s: Sequence[float]
    """Real time of each choice of a plan."""

"""Input and output of a simulation."""

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.planner.plan import Planner, Pool
from common.config import RouterConfig
from common.slo import Slo
from measure.load.records import PoolSample, RequestRecord, SessionPlace
from measure.simulate.timing import WindowPageSize, WorkerSpeed
from router.parts import Substitutes
from router.tenants import ANYBODY, Tenant


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
    """Time at which it was asked to leave; None: never."""
    gone_s: float | None = None
    is_flipped: bool = False
    """Whether it served the other pool before; its time there ended when this one began."""

    def paid_s(self, *, until_s: float) -> float:
        """Return the paid time up to `until_s`: starting, serving and draining."""
        end_s = until_s if self.gone_s is None else min(self.gone_s, until_s)
        return max(0.0, end_s - self.asked_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    """A tier of each worker."""

    num_blocks: int
    """Most blocks in it."""
    bytes_per_s: float
    """Rate at which blocks are read into pages; writing takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Workers, their pages and their limits."""

    num_prefill: int
    """0: aggregated. Every worker is a decode worker that computes its prompts itself."""
    num_decode: int
    num_routers: int = 1
    """Routers side by side, which get the requests in turn."""
    num_blocks: int = 3000
    """KV pages of each worker."""
    block_size: int = 512
    """Tokens of a page."""
    block_bytes: int = 512 * 327_680
    """KV of one page. Default: a 70B model with 8 KV heads of 128, 80 layers, 2 bytes."""
    windows: WindowPageSize | None = None
    """Pages beside those of blocks, of layers with a window or of recurrent ones; None: no layer has any."""
    tiers: tuple[TierShape, ...] = ()
    """Tiers of each worker, the first one first; models with windows have none."""
    max_step_tokens: int = 8192
    decode_step_tokens: int | None = None
    """Step budget of decode workers, aggregated ones included; None: `max_step_tokens`."""
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
    """Times of messages and KV transfers."""

    latency_s: float = 0.0005
    """Latency of every message, one way."""
    kv_bytes_per_s: float = 50e9
    """Bandwidth of each worker's link, in each direction; transfers that share a link queue there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """Everything else that a run depends on. Equal shape, settings and arrivals give equal results, byte for byte."""

    prefill: WorkerSpeed
    """Speed of prefill workers."""
    decode: WorkerSpeed
    """Speed of decode workers, including aggregated ones."""
    network: NetworkShape = field(default_factory=NetworkShape)
    router: RouterConfig = field(default_factory=RouterConfig)
    """Router settings; they name the policy."""
    substitutes: Substitutes = field(default_factory=Substitutes)
    """A policy in place of that one, and an order in place of the line's."""
    report_interval_s: float = 0.1
    """Minimum time between two reports of a worker's load and KV events."""
    event_lag_s: float = 0.0
    """Extra latency of reports over other messages."""
    tpot_slo_s: float = float("inf")
    timeout_s: float = 3600.0
    """Deadline of each request."""
    sample_interval_s: float | None = None
    """Interval at which the workers' load is sampled; None: never."""
    elasticity: Elasticity | None = None
    """Changes of the pools while the workload runs; None: no changes."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a workload."""

    at_s: float
    """Time of arrival; arrivals are ordered by it."""
    prompt: "array[int]"
    """Token ids, typecode "I"."""
    num_output_tokens: int
    """Length of the model's answer, whatever the limit. At least 1."""
    calls_tool: bool = False
    """Whether the answer ends with calls of tools."""
    max_tokens: int | None = None
    """Limit that the request states, all that a router knows; None: exactly `num_output_tokens`."""
    answer: "array[int] | None" = None
    """The answer's `num_output_tokens` token ids, so that the next turn of a chat finds them cached; None: filler."""
    session: int | None = None
    """Number of its session; None: a session of its own."""
    turn: int = 0
    """Position in its session."""
    place: SessionPlace | None = None
    """None: a session of its own."""
    ttft_slo_s: float = float("inf")
    """Objective that the client states."""
    kind: str = ""
    """Kind by which figures are grouped."""
    tenant: Tenant = ANYBODY
    """Sender, whose share and limits apply and whose salt keeps its KV apart."""
    follow_up: "Callable[[RequestRecord], Sequence[Arrival]] | None" = None
    """Called when the request has ended, however that was. Returns the requests that follow from it, at its end or
    later."""


@dataclass(slots=True, kw_only=True)
class WorkerResult:
    """One worker's counters at its end, or at the end of the run."""

    worker_id: str
    """prefill-0 …, decode-0 …"""
    num_steps: int
    busy_s: float
    """Virtual time spent in steps."""
    num_cached_tokens: int
    num_computed_tokens: int
    """Prompt tokens computed."""
    num_preemptions: int
    num_requests: int
    kv_bytes_sent: int
    kv_bytes_received: int

    @property
    def is_prefill(self) -> bool:
        """Whether it belongs to the prefill pool."""
        return self.worker_id.startswith("prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class WallClock:
    """Real time of a run, which differs each time."""

    wall_s: float
    num_choices: int
    choice_p50_us: float
    choice_p99_us: float


@dataclass(slots=True, kw_only=True)
class SimRun:
    """A finished run. All fields but `wall_s` and `choice_s` are functions of its input."""

    requests: tuple[RequestRecord, ...]
    """Requests in order of arrival. Times are virtual, since the first arrival, as the clients see them."""
    workers: list[WorkerResult]
    samples: tuple[PoolSample, ...] = ()
    stays: Sequence[Stay] = ()
    """Every worker's time in a pool, in the order in which workers were asked for."""
    num_moves: int = 0
    """Answers that moved to another worker because theirs was leaving."""
    end_s: float
    """Virtual time at which the last request ended."""
    wall_s: float
    """Real time of the run."""
    choice_s: Sequence[float]
    """Real time of each choice of a plan."""

    @property
    def clock(self) -> WallClock:
        """Real times of the run."""
        p50, p99 = np.percentile(self.choice_s, [50, 99]) if len(self.choice_s) else (0.0, 0.0)
        return WallClock(
            wall_s=self.wall_s,
            num_choices=len(self.choice_s),
            choice_p50_us=float(p50) * 1e6,
            choice_p99_us=float(p99) * 1e6,
        )

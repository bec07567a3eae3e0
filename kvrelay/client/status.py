"""The state of a cluster, as `Client.status` returns it.

Field names are those of the wire messages (proto/kvrelay/v1/inference.proto, worker.proto), which define each of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRefusals:
    """Requests of one tenant that were refused for one cause."""

    tenant: str
    cause: str
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHolder:
    """Part of a prefix that a worker holds."""

    worker_id: str
    num_blocks: int
    """Leading blocks that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """A prefix that requests have asked for again, whether or not some worker still held it."""

    digest: str
    """Digest of its last block."""
    num_blocks: int
    num_requests: float
    """Requests that asked for it again, each of which counts half after a minute."""
    age_s: float
    """Seconds since the last of them."""
    holders: tuple[PrefixHolder, ...]
    """Workers that hold its first block, most blocks first; some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """Use of a router and its workers by one tenant."""

    tenant: str
    weight: float
    num_queued: int
    num_active: int
    router_s: float
    """Time that its requests have taken of the event loop, and of what reads them."""
    compile_s: float
    """Time that workers have compiled what its answers had to follow."""
    num_prompt_tokens: int
    """Prompt tokens that were computed."""
    num_cached_tokens: int
    num_output_tokens: int
    num_set_back: int
    """Answers that gave their room on a decode worker to another tenant's request and went on later."""
    num_arriving_bytes: int
    """Bytes of its requests that have begun to arrive and have not been read."""
    num_unsent_entries: int
    """Tokens and log-probabilities of its answers that wait to be sent."""
    num_pinned_tokens: int = 0
    """Tokens that its marks have pinned on all workers now."""
    num_refused_pin_tokens: int = 0
    """Tokens of its marked prefixes that could not be pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """State of the router, and counts of its requests since its start."""

    policy: str
    num_queued: int
    num_active: int
    num_bookings: int
    num_index_blocks: int
    num_request_tasks: int
    num_completed: int
    num_cancelled: int
    num_failed: int
    num_replans: int
    alarms: tuple[str, ...] = ()
    """Descriptions of faults in the routing itself."""
    num_rejected: int = 0
    """Requests that could not be served as they were, of their caller, or then."""
    num_refused: int = 0
    """Requests refused before admission."""
    num_moves: int = 0
    """Answers that moved because their worker was about to leave."""
    http_port: int = 0
    """Port of the HTTP API on the router's host; 0 without one."""
    is_encrypted: bool = False
    """Whether the router's ports use TLS."""
    refusals: tuple[TenantRefusals, ...] = ()
    """Refused requests by tenant and cause."""
    hot_prefixes: tuple[HotPrefix, ...] = ()
    """Prefixes that requests ask for again most often, hottest first; some."""
    tenants: tuple[TenantUsage, ...] = ()
    """Present use by each tenant, and its use since the router's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPins:
    """What one tenant has pinned in a worker's pages."""

    tenant: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Load of a worker."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    """Pages neither referenced nor reserved, cached ones included."""
    num_blocks: int
    num_pending_prefill_tokens: int
    num_context_tokens: int
    num_reserved: int = 0
    num_decoding: int = 0
    prefill_backlog_s: float = 0.0
    num_cold_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_slots: int = 0
    """Sequences that may still join its batch; 0 also where it does not report them."""
    num_window_pages: int = 0
    """Pages of layers with a window, or of recurrent layers' states; 0 where no layer has any."""
    num_promised_window_pages: int = 0
    """Those that are promised to sequences: when all are, others wait, or are refused."""
    num_tier_blocks: int = 0
    """Blocks in its tiers, those that are in pages, too, included."""
    max_tier_blocks: int = 0
    """The most blocks that its tiers hold; 0: it has none."""
    tier_alarms: tuple[str, ...] = ()
    """What is wrong with its tiers now, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Totals of a worker's steps in the last seconds, and the least time that its device needs for them."""

    window_s: float
    covered_s: float
    num_prefill_steps: int
    num_decode_steps: int
    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int
    prefill_s: float
    decode_s: float
    prefill_memory_s: float
    prefill_compute_s: float
    decode_memory_s: float
    decode_compute_s: float
    decode_weights_s: float
    host_s: float = 0.0
    """Time between steps while there was work."""
    kv_bytes_received: int = 0
    link_s: float = 0.0
    """Least time of the pulled KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """Measured rates of a worker's device, and the work that its model asks of it."""

    read_bytes_per_s: float
    flops_per_s: float
    weight_bytes: int
    kv_bytes_per_token: int
    layer_flops: int
    head_flops: int
    pair_flops: int
    num_cores: int = 0
    """Cores that a step uses; 0 on an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """How fast KV comes to a worker by one transport."""

    transport: str
    most_bytes_per_s: float
    """Between pages of its host, as measured when it started; 0: not measured."""
    bytes_per_s: float
    """Lowest rate that pulls from any peer reach; 0: none yet."""
    peer_worker_id: str
    """The peer that `bytes_per_s` is of; empty: none yet."""
    num_pulls: int
    """Pulls from that peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Seconds of one engine step: a weighted sum of what is in it."""

    constant_s: float
    per_prefill_token_s: float
    per_prefill_pair_s: float
    per_decode_s: float
    per_context_token_s: float
    num_samples: int
    """Steps that it was fitted to; 0: a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingReport:
    """How long a worker's steps take."""

    prefill: StepModel
    decode: StepModel
    max_step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """State of a worker, and its counters since its start."""

    load: WorkerLoad
    num_used_blocks: int
    num_cached_blocks: int
    num_leases: int
    num_reservations: int
    num_request_tasks: int
    num_preemptions: int
    num_leases_expired: int
    num_cancelled: int
    kv_bytes_received: int
    kv_bytes_sent: int
    num_cached_tokens: int
    num_computed_tokens: int
    uptime_s: float
    pid: int
    epoch: int
    busy_s: float = 0.0
    num_drafted_tokens: int = 0
    """Draft tokens that its steps have verified."""
    num_accepted_tokens: int = 0
    """Draft tokens that were right."""
    recent_steps: tuple[StepTotals, ...] = ()
    """Steps of the last minute, the last five, and the last hour."""
    device: DeviceReport | None = None
    """None where it was not measured."""
    num_idle_cores: float | None = None
    """Cores of its host that were idle in the last minute, in the mean; None where it does not know."""
    link_rates: tuple[LinkRate, ...] = ()
    num_ranks: int = 1
    """Processes that share its weights and heads."""
    tenant_pins: tuple[TenantPins, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker as the router sees it."""

    worker_id: str
    role: str
    """"prefill" or "decode"."""
    address: str
    state: str
    """"ready", "draining", "connecting", "lost" or "refused: <why>"."""
    status: WorkerStatus | None
    """None while the worker cannot be reached."""
    slowness: float
    """Multiple of the step time of its pool's other workers, while it counts as slow; else 0."""
    num_failed_attempts: float
    """Attempts that it failed lately, each of which counts half after a minute."""
    timing: TimingReport
    """Its timing model, or its pool's while it has measured too few steps itself."""
    exact_resume: bool | None = None
    """Whether a token that it draws depends on the request and the tokens before it only; None: not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool's size, as it was and as it should be."""

    present: int
    wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerm:
    """A number behind a plan."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """One plan of the planner."""

    age_s: float
    prefill: PoolPlan
    decode: PoolPlan
    reason: str
    terms: tuple[PlanTerm, ...]
    outcome: str
    """Empty where there was nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStatus:
    """The planner's opinion of the pools' sizes, as a router received it last."""

    mode: str
    """"off", "advise" or "act"."""
    interval_s: float
    latest: PlanRecord | None
    changes: tuple[PlanRecord, ...]
    """Plans that wanted a change, newest first; some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The router and every worker, prefill first."""

    router: RouterStatus
    workers: tuple[WorkerView, ...]
    planner: PlannerStatus | None = None
    """None without a controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenWorker:
    """What one worker has forgotten of a tenant."""

    worker_id: str
    num_tier_blocks: int
    num_page_blocks: int
    """Blocks that it dropped from its pages: also those of which it does not know the tenant."""
    trouble: str
    """Why blocks may still be there, and what to do; empty: none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What all workers have forgotten of a tenant."""

    workers: tuple[ForgottenWorker, ...]
    sharing_tenants: tuple[str, ...]
    """Other tenants that share the forgotten blocks."""

"""The state of a cluster, as `Client.status` returns it.

Field names are those of the wire messages (kvrelay/v1/inference.proto, worker.proto), which define each of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """What the router holds, and how requests ended since it started."""

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
    """What is wrong with the routing itself, in words."""
    num_refused: int = 0
    """Refused at the door."""
    num_moves: int = 0
    """Answers that went on elsewhere because their worker was about to go."""
    http_port: int = 0
    """Of the OpenAI-compatible door, on the router's own host; 0: there is none."""
    is_encrypted: bool = False
    """Whether its doors are TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker is busy with."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    """Pages neither referenced nor reserved; cached ones included."""
    num_blocks: int
    num_pending_prefill_tokens: int
    num_context_tokens: int
    num_reserved: int = 0
    num_decoding: int = 0
    prefill_backlog_s: float = 0.0
    num_cold_blocks: int = 0
    num_cached_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """Everything that a worker holds, and its counters since it started."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The router and every worker, prefill first."""

    router: RouterStatus
    workers: tuple[WorkerView, ...]

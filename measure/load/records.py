"""What a load test keeps: one record for each request, samples of the pools, and what was run.

Times are seconds since the run began, on the generator's clock, unless a name says that the server measured them.

    DIR/run.json        `RunInfo`: what was run, on what, and how the generator itself did
    DIR/requests.jsonl  a `RequestRecord` a line, in order of their ends
    DIR/samples.jsonl   a `PoolSample` a line
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


class Outcome(enum.StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """Told to come back later, before its first token."""
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    """By the load test itself, which was ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """What the server says of a request; None where it says nothing."""

    request_id: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    """First to last KV block at the decode worker."""
    transfer_exposed_s: float | None = None
    """The part of the transfer that prefill did not hide."""
    ttft_s: float | None = None
    """Received to first token sent."""
    e2e_s: float | None = None
    num_cached_tokens: int | None = None
    num_pulled_tokens: int | None = None
    num_decode_cached_tokens: int | None = None
    transfer_bytes: int | None = None
    transport: str | None = None
    prefill_worker: str | None = None
    """None as well for a local plan."""
    decode_worker: str | None = None
    num_attempts: int | None = None
    predicted_ttft_s: float | None = None
    predicted_cached_tokens: int | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "ServerReport":
        """Return what our own servers say of a request, as docs/openai.md has it."""
        plan, transfer = told["plans"][-1], told["transfer"]
        said = told["usage"] | told["timings"] | plan | told
        same = {each.name: said[each.name] for each in fields(cls) if each.name in said}
        return cls(
            **same
            | {
                "transfer_bytes": transfer["kv_bytes"],
                "transport": transfer["transport"],
                "prefill_worker": plan["prefill_worker_id"] or None,
                "decode_worker": plan["decode_worker_id"],
                "predicted_ttft_s": plan["predicted_ttft_s"] or None,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, from first principles: when it was due, when it was sent, when each piece of the answer came."""

    index: int
    """In the order in which requests became due."""
    session: int
    turn: int
    """0 for the first of its session."""
    kind: str
    """The stream of the workload that it belongs to."""
    due_s: float
    """When it should have been sent. Latencies count from here, so a late generator or a full connection cannot
    hide a wait."""
    sent_s: float
    """When it was sent."""
    chunk_s: tuple[float, ...]
    """When each piece of the answer came that brought tokens."""
    chunk_tokens: tuple[int, ...]
    """How many tokens each of them brought."""
    end_s: float
    """Of the answer, the refusal or the error."""
    outcome: Outcome
    error: str = ""
    """Error class and message; empty after a complete answer."""
    num_prompt_tokens: int
    """As the server counts when it says; else as asked."""
    num_wanted_tokens: int
    """Output tokens that were asked for."""
    server: ServerReport = field(default_factory=ServerReport)

    @property
    def lag_s(self) -> float:
        """By how much the generator was late."""
        return self.sent_s - self.due_s

    @property
    def is_complete(self) -> bool:
        """Whether it was answered to its end."""
        return self.outcome is Outcome.COMPLETED

    @property
    def num_output_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.chunk_tokens)

    @property
    def first_token_s(self) -> float | None:
        """When the first token came."""
        return self.chunk_s[0] if self.chunk_s else None

    @property
    def ttft_s(self) -> float | None:
        """Due to first token."""
        return self.chunk_s[0] - self.due_s if self.chunk_s else None

    @property
    def itl_s(self) -> float | None:
        """Mean gap between tokens (TPOT): first to last token, by all tokens but one; None with fewer than two."""
        num_gaps = self.num_output_tokens - 1
        return (self.chunk_s[-1] - self.chunk_s[0]) / num_gaps if num_gaps > 0 else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Gaps between consecutive pieces of the answer (ITL): what a reader waits, however many tokens come."""
        return tuple(after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False))

    @property
    def e2e_s(self) -> float:
        """Due to end."""
        return self.end_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """A worker at one moment."""

    worker_id: str
    role: str
    """"prefill", "decode", or what the target calls its servers."""
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    """Referenced or reserved."""
    num_cached_blocks: int = 0
    """Kept for their prefixes, referenced by nobody."""
    num_computed_tokens: int = 0
    """Prompt tokens computed since the worker began."""
    num_cached_tokens: int = 0
    """Prompt tokens found in its cache since it began."""
    busy_s: float | None = None
    """Time that its engine spent in steps since it began, where it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """All workers at one moment, and the line before them."""

    at_s: float
    num_queued: int
    workers: tuple[WorkerSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorReport:
    """How the generator itself did: whether the numbers are the server's."""

    num_processes: int
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    """By how much requests were sent late."""
    loop_lag_p99_s: float
    """By how much a process noticed late that something had come: an error of every time stamp."""
    cpu_share: float
    """Of the busiest process, of one core."""
    num_late: int
    """Requests sent later than `LATE_S`."""
    warnings: tuple[str, ...]
    """Why the numbers cannot be trusted, in words; empty when they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What was run."""

    name: str
    target: str
    """Kind and address."""
    system: str
    """What answered, as it calls itself."""
    model: str
    workload: dict[str, Any]
    """The specification, as JSON."""
    started_at: str
    """Date and time, ISO 8601, UTC."""
    duration_s: float
    """From the first due request to the last answer."""
    num_workers: dict[str, int]
    """By role; empty when the target does not tell."""
    generator: GeneratorReport
    labels: dict[str, str] = field(default_factory=dict)
    """What the caller says of the run: pool shape, policy, repeat …"""
    notes: tuple[str, ...] = ()
    """What a reader of the numbers should know, in words: what the target does not offer, what was cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished load test."""

    info: RunInfo
    requests: tuple[RequestRecord, ...]
    samples: tuple[PoolSample, ...] = ()

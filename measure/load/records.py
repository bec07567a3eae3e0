"""Results of a load test: a record per request, samples of the pools, and a description of the run.

Times are seconds since the run began, on the generator's clock; those that the server measured are named so.

    DIR/run.json        `RunInfo`: the workload, the target, and how the generator itself did
    DIR/requests.jsonl  a `RequestRecord` per line, in order of their ends
    DIR/samples.jsonl   a `PoolSample` per line
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from common.errors import DeadlineExceeded, KvrelayError, Overloaded
from common.slo import Slo
from kvrelay.client.events import Forecast


class Outcome(enum.StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """Rejected before its first token; the client may retry."""
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    """Cancelled by the load test itself, which was ended early."""

    @classmethod
    def of(cls, failure: KvrelayError | None, *, has_tokens: bool) -> "Outcome":
        """Return the outcome of a request that failed, or of a complete one."""
        match failure:
            case None:
                return cls.COMPLETED
            case DeadlineExceeded():
                return cls.TIMED_OUT
            case Overloaded() if not has_tokens:
                return cls.REFUSED
        return cls.FAILED


_FORECASTS = ("ttft_forecast", "line_ttft_forecast", "tpot_forecast")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """Report of the server on a request; fields are None where it reports nothing."""

    request_id: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    """First to last KV block at the decode worker."""
    transfer_exposed_s: float | None = None
    """The part of the transfer that prefill did not hide."""
    ttft_s: float | None = None
    """From receiving the request to sending its first token."""
    e2e_s: float | None = None
    num_cached_tokens: int | None = None
    num_pulled_tokens: int | None = None
    num_decode_cached_tokens: int | None = None
    transfer_bytes: int | None = None
    transport: str | None = None
    prefill_worker: str | None = None
    """None for a local plan, too."""
    decode_worker: str | None = None
    num_attempts: int | None = None
    predicted_ttft_s: float | None = None
    predicted_cached_tokens: int | None = None
    ttft_forecast: Forecast | None = None
    """Time from the receipt of the request to the first token, as forecast at the choice of its plan."""
    line_ttft_forecast: Forecast | None = None
    """The same as forecast when the request entered the line; None also when it did not wait there."""
    tpot_forecast: Forecast | None = None
    """Mean gap between tokens."""

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> "ServerReport":
        """Return the report of one of our own servers, in the form of docs/openai.md."""
        plan, transfer = report["plans"][-1], report["transfer"]
        values = report["usage"] | report["timings"] | plan | report
        same = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(
            **same
            | {
                "transfer_bytes": transfer["kv_bytes"],
                "transport": transfer["transport"],
                "prefill_worker": plan["prefill_worker_id"] or None,
                "decode_worker": plan["decode_worker_id"],
                "predicted_ttft_s": plan["predicted_ttft_s"] or None,
            }
            | {name: Forecast(**plan[name]) if plan.get(name) else None for name in _FORECASTS}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlace:
    """A request's place in its session, as planned."""

    num_turns: int
    """Requests of the session."""
    think_s: float
    """Time from the last of the answers that it waited for, or from the session's begin, to its due time."""
    idle_s: float | None = None
    """Time that an idle server would take, with the session's text so far in its cache; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request: when it was due, when it was sent, and when each piece of its answer came."""

    index: int = 0
    """Number in the order of due times; 0 until it is known."""
    session: int
    turn: int
    """0 for the first request of its session."""
    kind: str
    """Stream of the workload that it belongs to."""
    due_s: float
    """Time at which it should have been sent. Latencies count from here, so that neither a late generator nor a full
    connection hides a wait."""
    sent_s: float
    chunk_s: tuple[float, ...]
    """Arrival times of the pieces of the answer that brought tokens."""
    chunk_tokens: tuple[int, ...]
    """Number of tokens that each of them brought."""
    end_s: float
    """End of the answer, or time of the refusal or error."""
    outcome: Outcome
    error: str = ""
    """Error class and message; empty after a complete answer."""
    num_prompt_tokens: int
    """Count of the server where it reports one, else as planned."""
    num_wanted_tokens: int
    place: SessionPlace | None = None
    """None: it is a session of its own."""
    server: ServerReport = field(default_factory=ServerReport)

    @property
    def lag_s(self) -> float:
        """Delay of the generator."""
        return self.sent_s - self.due_s

    @property
    def is_complete(self) -> bool:
        """Whether the answer came to its end."""
        return self.outcome is Outcome.COMPLETED

    @property
    def num_output_tokens(self) -> int:
        """Output tokens received."""
        return sum(self.chunk_tokens)

    @property
    def first_token_s(self) -> float | None:
        """Arrival of the first token."""
        return self.chunk_s[0] if self.chunk_s else None

    @property
    def ttft_s(self) -> float | None:
        """Due to first token."""
        return self.chunk_s[0] - self.due_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens (TPOT): first to last token, by all tokens but one; None with fewer than two."""
        num_gaps = self.num_output_tokens - 1
        return (self.chunk_s[-1] - self.chunk_s[0]) / num_gaps if num_gaps > 0 else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Gaps between consecutive pieces of the answer (ITL), whatever number of tokens each piece holds."""
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
    """Blocks that are referenced or reserved."""
    num_cached_blocks: int = 0
    """Blocks that are kept for their prefixes, not referenced."""
    num_computed_tokens: int = 0
    """Prompt tokens computed since the worker started."""
    num_cached_tokens: int = 0
    """Prompt tokens found in its cache since it started."""
    busy_s: float | None = None
    """Time that its engine spent in steps since it started; None where the target does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """All workers at one moment, and the router's queue."""

    at_s: float
    num_queued: int
    workers: tuple[WorkerSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorReport:
    """How well the generator itself kept up, and so whether the numbers are the server's."""

    num_processes: int
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    """Delay in sending requests."""
    loop_lag_p99_s: float
    """Delay of a process in noticing received data: an error of every time stamp."""
    cpu_share: float
    """Share of one core that the busiest process used."""
    num_late: int
    warnings: tuple[str, ...]
    """Reasons not to trust the numbers; empty when there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Description of a run."""

    name: str
    target: str
    """Kind and address."""
    system: str
    """Name that the server gives itself."""
    model: str
    workload: dict[str, Any]
    started_at: str
    duration_s: float
    """From the first due request to the last answer."""
    num_workers: dict[str, int]
    """Workers by role; empty when the target does not report them."""
    generator: GeneratorReport
    labels: dict[str, str] = field(default_factory=dict)
    """Labels by the caller: pool shape, policy, repeat …"""
    told_slo: Slo | None = None
    """Objectives that each request named to the server; None: none."""
    notes: tuple[str, ...] = ()
    """Remarks for readers of the numbers: features that the target does not have, requests that were cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished load test."""

    info: RunInfo
    requests: tuple[RequestRecord, ...]
    samples: tuple[PoolSample, ...] = ()

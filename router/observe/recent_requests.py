"""The requests answered in the last hour, with the parts of their time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.clock import Clock
from common.ids import RequestId
from common.lifecycle import State
from router.placement.waits import NO_WAITS, WaitCause, WaitingRequest, Waits
from router.record.record import RunningRequest

REMEMBERED_S = 3600.0
CAPACITY = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRequest:
    """A completely answered request. A ServedOutcome (common/slo.py)."""

    request_id: RequestId
    tenant: str
    ended_s: float
    """On the router's clock."""
    num_prompt_tokens: int
    num_computed_tokens: int
    num_evicted_tokens: int
    """Prompt tokens that caches had held and had evicted when it was planned."""
    num_output_tokens: int
    """Output tokens of one sample, in the mean."""
    line_s: float
    """Receipt to the first plan."""
    worker_queue_s: float
    """First plan to the first chunk of the prompt."""
    waits: Waits = NO_WAITS
    """Parts of both in line, by what was waited for."""
    prefill_s: float
    transfer_exposed_s: float
    ttft_s: float
    tpot_s: float | None
    num_attempts: int
    is_complete: bool = True

    @property
    def queue_s(self) -> float:
        """Receipt to the first chunk of the prompt."""
        return self.line_s + self.worker_queue_s

    @property
    def prefill_wait_s(self) -> float:
        """The rest of the time before the first chunk of the prompt."""
        return max(0.0, self.queue_s - sum(self.waits[cause] for cause in WaitCause if cause is not WaitCause.PREFILL))

    @property
    def whole_s(self) -> float:
        """Receipt to the last token."""
        return self.ttft_s + self.decode_s

    @property
    def decode_s(self) -> float:
        """Time from the first token to the last one."""
        return (self.tpot_s or 0.0) * max(0, self.num_output_tokens - 1)


InLine = RecentRequest | WaitingRequest
"""A request that has waited in line, or waits now."""

_AWAITED = {
    WaitCause.PREFILL: "prefill",
    WaitCause.DECODE_ROOM: "a slot and pages on a decode worker",
    WaitCause.DECODE_PACE: "the pace of answers (slo.tpot_s)",
    WaitCause.TENANT_LIMIT: "the tenant's own requests (max_concurrent)",
    WaitCause.WORKER: "a worker that could be chosen",
}


def longest_awaited(requests: Sequence[InLine]) -> str:
    """Return what requests have waited longest for in line; empty where none has waited."""
    waits = sum((each.waits for each in requests), start=NO_WAITS)
    cause = max(WaitCause, key=lambda each: waits[each])
    return _AWAITED[cause] if waits[cause] > 0 else ""


def most_awaited(requests: Sequence[InLine]) -> str:
    """Return the same as the end of a phrase."""
    awaited = longest_awaited(requests)
    return f", mostly for {awaited}" if awaited else ""


class RecentRequests:
    """The latest answered requests, at most `CAPACITY`. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests: deque[RecentRequest] = deque(maxlen=CAPACITY)

    def note(self, record: RunningRequest) -> None:
        """Remember a request that was answered completely."""
        life, timings, answered = record.life, record.timings, record.answered
        planned_s = life.first(State.RESERVING)
        line_s = 0.0 if planned_s is None else planned_s - life.received_s
        self._requests.append(
            RecentRequest(
                request_id=record.job.request_id,
                tenant=record.tenant.name,
                ended_s=self._clock.monotonic(),
                num_prompt_tokens=answered.num_prompt_tokens,
                num_computed_tokens=answered.num_computed_tokens,
                num_evicted_tokens=answered.num_evicted_tokens,
                num_output_tokens=answered.num_output_tokens,
                line_s=line_s,
                worker_queue_s=max(0.0, timings.queue_s - line_s),
                waits=record.waits,
                prefill_s=timings.prefill_s,
                transfer_exposed_s=timings.transfer_exposed_s,
                ttft_s=timings.ttft_s,
                tpot_s=answered.tpot_s,
                num_attempts=record.num_attempts,
            )
        )

    def over(self, window_s: float) -> Sequence[RecentRequest]:
        """Return the requests that ended in the last `window_s`, oldest first."""
        begin_s = self._clock.monotonic() - window_s
        found: list[RecentRequest] = []
        for request in reversed(self._requests):
            if request.ended_s < begin_s:
                break
            found.append(request)
        return found[::-1]

    def find(self, request_id: RequestId) -> RecentRequest | None:
        """Return a remembered request."""
        return next((each for each in reversed(self._requests) if each.request_id == request_id), None)

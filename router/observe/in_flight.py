"""The requests that run at this router, and those that ended a moment ago, for operators."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from common.clock import Clock
from common.lifecycle import LifeCycle
from router.fleet.decisions import shown_workers
from router.record.record import RunningRequest

SHOWN_ENDED = 50
SHOWN_RUNNING = 200
SHOWN_STAGES = 32
"""Latest stages that are kept of a request: it may be planned again any number of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A request as a picture shows it. Ages are seconds before the view."""

    request_id: str
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    prefill_worker_id: str
    """Empty without one, and before the first plan."""
    decode_worker_id: str
    num_attempts: int
    stages: tuple[tuple[str, float], ...] = ()
    """States of the life cycle, each with the age of its beginning, oldest first."""


@dataclass(frozen=True, slots=True)
class _Ended:
    view: RequestView
    """The view without its stages."""
    life: LifeCycle
    ended_s: float


class InFlight:
    """Running requests in the order of their arrival. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: dict[RunningRequest, None] = {}
        self._ended: deque[_Ended] = deque(maxlen=SHOWN_ENDED)
        self._num_ended_tokens = 0

    @contextmanager
    def following(self, record: RunningRequest) -> Iterator[None]:
        """Show the request while the block runs, and for some time after it."""
        self._running[record] = None
        try:
            yield
        finally:
            del self._running[record]
            self._num_ended_tokens += record.ledger.num_taken
            self._ended.append(_Ended(_view(record), record.life, self._clock.monotonic()))

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that this router has delivered since its start."""
        return self._num_ended_tokens + sum(each.ledger.num_taken for each in self._running)

    def views(self, *, ended_for_s: float) -> list[RequestView]:
        """Return the requests that ended in the last seconds, then the running ones, oldest first; some hundreds."""
        now_s = self._clock.monotonic()
        ended = [each for each in self._ended if now_s - each.ended_s <= ended_for_s]
        running = list(self._running)[-SHOWN_RUNNING:]
        return [
            *(replace(each.view, stages=_stages(each.life, now_s)) for each in ended),
            *(replace(_view(each), stages=_stages(each.life, now_s)) for each in running),
        ]


def _view(record: RunningRequest) -> RequestView:
    """Return a request without its stages."""
    prefill, decode = ("", "") if record.plan is None else shown_workers(record.plan, record.plan)
    return RequestView(
        request_id=record.job.request_id,
        tenant=record.tenant.name,
        num_prompt_tokens=len(record.job.prompt_token_ids),
        num_cached_tokens=record.num_cached_tokens,
        num_output_tokens=record.ledger.num_tokens,
        prefill_worker_id=prefill,
        decode_worker_id=decode,
        num_attempts=record.num_attempts,
    )


def _stages(life: LifeCycle, now_s: float) -> tuple[tuple[str, float], ...]:
    return tuple((state.value, now_s - at_s) for state, at_s in life.stamps[-SHOWN_STAGES:])

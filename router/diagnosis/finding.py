"""One cause of lost time, and what it is judged by."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.ids import RequestId
from router.diagnosis.changes import PredictedFigure, SuggestedChange
from router.diagnosis.pool import DiagnosedPool
from router.fleet.hot_prefixes import ReportedPrefix
from router.observe.recent_requests import InLine, RecentRequest
from router.placement.waits import WaitCause, WaitingRequest

Terms = Callable[[Iterable[RequestId]], Mapping[RequestId, Mapping[str, float]]]
"""Returns the parts of the cost of the latest plan of each of these requests, as far as they are known."""


class Cause(enum.Enum):
    """A cause of lost time."""

    SLOW_WORKER = "slow_worker"
    HOT_TENANT = "hot_tenant"
    TIER_READ = "tier_read"
    CACHE_EVICTIONS = "cache_evictions"
    PREFILL = "prefill"
    DECODE_PACE = "decode_pace"
    DECODE_ROOM = "decode_room"
    TENANT_LIMIT = "tenant_limit"
    NO_WORKER = "no_worker"
    TRANSFER = "transfer"
    DECODE = "decode"
    DECODE_STALLS = "decode_stalls"
    TAIL = "tail"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisFinding:
    """One cause of lost time."""

    cause: Cause
    pool: str
    """The pool that it concerns; empty where it is none in particular."""
    lost_s: float
    """Time that a request loses by it, in the mean."""
    text: str
    options: tuple[SuggestedChange, ...] = ()
    """Changes that would help, with what each would bring."""

    @property
    def changes(self) -> tuple[str, ...]:
        """Those changes in sentences."""
        return tuple(each.text for each in self.options)

    @property
    def predictions(self) -> tuple[PredictedFigure, ...]:
        """The figures in those sentences."""
        return tuple(each.predicted for each in self.options if each.predicted is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisInput:
    """A router's knowledge of the last minutes."""

    requests: Sequence[RecentRequest]
    reader: DiagnosedPool
    """The pool that computes prompts."""
    decoder: DiagnosedPool
    """The pool that decodes; the same one where a single pool does both."""
    waiting: Sequence[WaitingRequest] = ()
    """Requests that wait in line now."""
    prefixes: Sequence[ReportedPrefix] = ()
    """Prefixes that are asked for most often, hottest first."""
    terms: Terms = lambda _requests: {}

    @property
    def in_line(self) -> Sequence[InLine]:
        """The answered requests and those that wait now."""
        return (*self.requests, *self.waiting)


def mean_whole_s(requests: Sequence[InLine]) -> float:
    """Return the time of a request, in the mean."""
    return fmean(each.whole_s for each in requests)


def mean_wait_s(requests: Sequence[InLine], cause: WaitCause) -> float:
    """Return the wait in line for a cause, in the mean."""
    return fmean(each.waits[cause] for each in requests)


def mean(requests: Sequence[RecentRequest], read: Callable[[RecentRequest], float]) -> float:
    """Return the mean of a figure."""
    return fmean(map(read, requests))


def describe_walls(pool: DiagnosedPool) -> str:
    """Return a pool's shares of its floors; empty where the device was not measured."""
    if not pool.memory_share and not pool.compute_share:
        return ""
    return (
        f"; of the time in steps, memory traffic needs at least {pool.memory_share:.0%}, arithmetic"
        f" {pool.compute_share:.0%}, and {pool.overhead_share:.0%} is neither"
    )

"""The order of one tenant's waiting requests: by size with ageing, the late ones behind those in time.

Higher priority goes first; then least `size_s + AGEING * due_s`, where `due_s` is the latest time at which the
computation may begin and still be in time for the first token; without an objective, the arrival. The size is the
prompt's time, and with an objective the answers' too, by which pool is short (`Roster.size_s`). A large request gives
way to small ones, but only to those that arrive within `size_s / AGEING` seconds after it. Requests age alike, so the
order of two waiting requests never changes, and a heap holds it.

Requests that are late for their objective go behind those in time. The aim: as many requests as possible within their
objectives, while each of the others still gets its answer before its deadline or is refused with a true retry-after,
at a price of at most `late_share` of the work. Late requests therefore go when no others of their tenant wait; and
before others whenever the work of all that the tenant was granted has paid, at that share, for the last late one that
did. Among late requests, higher priority goes first, then the earlier deadline: those that can no longer be answered
are refused when their turn comes (shedding.py). The share is of work, not of requests, because late ones are mostly
long. One request at a time may exceed it, so that none is too long for ever.
"""

import heapq
import math
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from router.line.queued_work import QueuedWork, Rank

AGEING = 0.3
"""Seconds of work that a second of waiting outweighs."""
_MIN_STALE = 64

P = TypeVar("P", bound="Place")


def rank(*, priority: int, size_s: float, due_s: float, number: int) -> Rank:
    """Return the key of a request within its tenant; low goes first, and no two keys are equal."""
    return (-priority, size_s + AGEING * due_s, number)


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """A place in line; what waits there extends it. The first four fields are set before, the others by the queue."""

    rank: Rank = ()
    """Key within its tenant's queue; low goes first."""
    due_s: float = math.inf
    """Time after which it is late."""
    work_s: float = 0.0
    """Time that one worker spends on it; 0: not counted in what is before others."""
    deadline_s: float = math.inf
    """Time at which it gives up; late ones go in this order."""
    queue: "TenantQueue[Any]" = field(init=False)
    number: int = 0
    """Position in the order in which places came to the queue."""
    is_late: bool = False
    """Whether it was found late."""
    is_waiting: bool = False
    """Whether it is in line; `pop` takes it out."""
    counted: tuple[QueuedWork, Rank] | None = None
    """Where its work is counted, and under which rank."""

    def count_in(self, work: QueuedWork, rank: Rank) -> None:
        """Count its work as waiting, here and nowhere else."""
        self.uncount()
        if self.work_s:
            work.add(rank, self.work_s)
            self.counted = work, rank

    def uncount(self) -> None:
        """Count its work as waiting no more. Harmless when repeated."""
        if self.counted is not None:
            work, rank = self.counted
            work.remove(rank, self.work_s)
            self.counted = None


_Entry = tuple[Rank, int, P]
"""Key, number of the place as it was then, and the place, which may have left, or returned, since."""


@dataclass(slots=True, eq=False)
class TenantQueue(Generic[P]):
    """Places of one tenant. The heaps include places that are no longer waiting; `heap` includes late ones, too."""

    name: str
    weight: float
    late_share: float = 0.0
    yields: bool = False
    """Late items go after the items of all tenants."""
    heap: list[_Entry[P]] = field(default_factory=list)
    """Items by rank."""
    due: list[_Entry[P]] = field(default_factory=list)
    """Items by the time after which they are late."""
    late: list[_Entry[P]] = field(default_factory=list)
    """Items that were found late, by priority and deadline."""
    work: QueuedWork = field(default_factory=QueuedWork)
    """Work of the waiting items that were not found late."""
    late_work: QueuedWork = field(default_factory=QueuedWork)
    num_added: int = 0
    num_waiting: int = 0
    late_debt: float = 0.0
    """Work of late items that went before those in time and is not paid for yet; none goes before them while it is
    positive."""
    counter: float = 0.0
    is_held: bool = False

    @property
    def contends(self) -> bool:
        """Whether it has items that may be served now."""
        return self.num_waiting > 0 and not self.is_held

    def add(self, place: P) -> None:
        """Put a new item in line."""
        self.num_added += 1
        place.queue, place.number, place.is_late = self, self.num_added, False
        if place.due_s != math.inf:
            heapq.heappush(self.due, ((place.due_s,), place.number, place))
        self.restore(place)

    def restore(self, place: P) -> None:
        """Put an item that was taken out back at the same place."""
        place.is_waiting = True
        self.num_waiting += 1
        if place.is_late:
            self._add_late(place)
        else:
            heapq.heappush(self.heap, (place.rank, place.number, place))

    def remove(self, place: P) -> None:
        """Take a waiting item out of line; the heaps forget it when they hold too many such ones."""
        place.is_waiting = False
        self.num_waiting -= 1
        for heap in (self.heap, self.due, self.late):
            if len(heap) > max(2 * self.num_waiting, _MIN_STALE):
                heap[:] = filter(_stands, heap)
                heapq.heapify(heap)

    def take(self, now_s: float) -> P:
        """Take out the next item; at least one waits."""
        self._find_late(now_s)
        late, in_time = _first(self.late), _first(self.heap)
        if late is not None and (in_time is None or self._has_late_turn):
            place = late
            heapq.heappop(self.late)
        else:
            assert in_time is not None, f"none of {self.num_waiting} items that wait is in a heap"
            place = in_time
            heapq.heappop(self.heap)
        place.is_waiting = False
        self.num_waiting -= 1
        return place

    def turn(self, now_s: float) -> tuple[bool, float]:
        """Return what its turn goes by, low first: whether its items go after those of all others, and its counter."""
        if self.yields:
            self._find_late(now_s)
        return self.is_parked, self.counter

    @property
    def is_parked(self) -> bool:
        """Whether it has stood behind all others, so that its counter is out of date."""
        return self.yields and _first(self.heap) is None

    @property
    def _has_late_turn(self) -> bool:
        return not self.yields and self.late_share > 0 >= self.late_debt

    def grant(self, place: P, work: float) -> None:
        """Count the work of an item that is served, for the share of late ones."""
        if place.is_late and _first(self.heap) is not None:
            self.late_debt += (1 - self.late_share) * work
        else:
            # What late items do not use is not saved up.
            paid = self.late_share * work
            self.late_debt = max(self.late_debt - paid, -paid)

    def _find_late(self, now_s: float) -> None:
        while self.due and self.due[0][0] < (now_s,):
            entry = heapq.heappop(self.due)
            if _stands(entry):
                self.note_late(entry[-1])
                self._add_late(entry[-1])

    def note_late(self, place: P) -> None:
        """Count an item among the late ones."""
        place.is_late = True
        place.count_in(self.late_work, late_rank(place))

    def _add_late(self, place: P) -> None:
        heapq.heappush(self.late, (late_rank(place), place.number, place))


def _stands(entry: _Entry[P]) -> bool:
    """Return whether a place waits where it was entered."""
    _key, number, place = entry
    return place.is_waiting and place.number == number


def _first(heap: list[_Entry[P]]) -> P | None:
    """Return the first item that waits in the heap."""
    while heap:
        key, _number, place = heap[0]
        # A late one stays in the heap where it stood while it was in time.
        if _stands(heap[0]) and not (place.is_late and key is place.rank):
            return place
        heapq.heappop(heap)
    return None


def late_rank(place: Place) -> Rank:
    """Return the key of an item among those that are late: its priority, then its deadline."""
    return place.rank[0], place.deadline_s, place.number

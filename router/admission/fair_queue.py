"""The order of the line: weighted fair between tenants, size-aware with ageing within one.

Between tenants: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
Each tenant has a counter of the tokens that it was served, divided by its weight; the waiting tenant with the lowest
counter goes next. A tenant that comes back after a pause is lifted to the lowest counter of the waiting ones, so it
cannot save up its share. The weighted service of two tenants that both keep waiting then differs by no more than what
is in flight at once, whatever their requests look like. A tenant that *yields* goes after all others while all its
requests are late; to have waited there counts as a pause.

Within a tenant: higher priority first; then least `work_s + AGEING * due_s`, where `due_s` is the latest time at which
the computation may begin and still be in time for the first token; without an objective, the arrival. A long prompt
gives way to short ones, but only to those that arrive within `work_s / AGEING` seconds after it. Requests age alike,
so the order of two waiting requests never changes, and a heap holds it.

Requests that are late for their objective go behind those in time. The aim: as many requests as possible within their
objectives, while each of the others still gets its answer before its deadline or is refused with a true retry-after,
at a price of at most `late_share` of the work. Late requests therefore go when no others of their tenant wait; and
before others whenever the work of all that the tenant was granted has paid, at that share, for the last late one that
did. Among late requests, higher priority goes first, then the earlier deadline: those that can no longer be answered
are refused when their turn comes (chooser.py). The share is of work, not of requests, because late ones are mostly
long. One request at a time may exceed it, so that none is too long for ever.

Every operation costs O(log n + tenants) for n waiting requests. What is before a request is known from running sums
(queued_work.py), for forecasts of its wait.
"""

import heapq
import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.admission.queued_work import QueuedWork, Rank

AGEING = 0.3
"""Seconds of prefill that a second of waiting outweighs."""
PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
FIRST = ""
"""Name of the queue before all newcomers, for `pop(skipping=…)`."""
_MIN_STALE = 64

T = TypeVar("T")


def rank(*, priority: int, work_s: float, due_s: float, number: int) -> Rank:
    """Return the key of a request within its tenant; low goes first, and no two keys are equal."""
    return (-priority, work_s + AGEING * due_s, number)


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """The place of one item in line."""

    item: T
    tenant: str
    """FIRST for items before all newcomers."""
    queue: "_TenantQueue[T]"
    rank: Rank
    due_s: float = math.inf
    """Time after which the item is late."""
    work_s: float = 0.0
    """Time that one worker spends on it; 0: not counted in what is before others."""
    deadline_s: float = math.inf
    """Time at which it gives up; late items go in this order."""
    number: int = 0
    """Position in the order in which items came to the queue."""
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


_Entry = tuple[Rank, int, Place[T]]
"""Key, position in the order of arrival, and the item."""


@dataclass(slots=True, eq=False)
class _TenantQueue(Generic[T]):
    """Items of one tenant. The heaps include places that are no longer waiting; `heap` includes late ones, too."""

    weight: float
    late_share: float = 0.0
    yields: bool = False
    """Late items go after the items of all tenants."""
    heap: list[_Entry[T]] = field(default_factory=list)
    """Items by rank."""
    due: list[_Entry[T]] = field(default_factory=list)
    """Items by the time after which they are late."""
    late: list[_Entry[T]] = field(default_factory=list)
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
        return self.num_waiting > 0 and not self.is_held

    def add(self, place: Place[T]) -> None:
        self.num_added += 1
        place.number = self.num_added
        if place.due_s != math.inf:
            heapq.heappush(self.due, ((place.due_s,), place.number, place))
        self.restore(place)

    def restore(self, place: Place[T]) -> None:
        place.is_waiting = True
        self.num_waiting += 1
        if place.is_late:
            self._add_late(place)
        else:
            heapq.heappush(self.heap, (place.rank, place.number, place))

    def remove(self, place: Place[T]) -> None:
        place.is_waiting = False
        self.num_waiting -= 1
        for heap in (self.heap, self.due, self.late):
            if len(heap) > max(2 * self.num_waiting, _MIN_STALE):
                heap[:] = [entry for entry in heap if entry[-1].is_waiting]
                heapq.heapify(heap)

    def take(self, now_s: float) -> Place[T]:
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

    def is_behind(self, now_s: float) -> bool:
        """Return whether all its items go after those of the other tenants."""
        if not self.yields:
            return False
        self._find_late(now_s)
        return _first(self.heap) is None

    @property
    def _has_late_turn(self) -> bool:
        return not self.yields and self.late_share > 0 >= self.late_debt

    def grant(self, place: Place[T], work: float) -> None:
        if place.is_late and _first(self.heap) is not None:
            self.late_debt += (1 - self.late_share) * work
        else:
            # What late items do not use is not saved up.
            paid = self.late_share * work
            self.late_debt = max(self.late_debt - paid, -paid)

    def _find_late(self, now_s: float) -> None:
        while self.due and self.due[0][-1].due_s < now_s:
            place = heapq.heappop(self.due)[-1]
            if place.is_waiting:
                self.note_late(place)
                self._add_late(place)

    def note_late(self, place: Place[T]) -> None:
        place.is_late = True
        place.count_in(self.late_work, _late_rank(place))

    def _add_late(self, place: Place[T]) -> None:
        heapq.heappush(self.late, (_late_rank(place), place.number, place))


def _first(heap: list[_Entry[T]]) -> Place[T] | None:
    """Return the first item that waits in the heap."""
    while heap:
        key, _number, place = heap[0]
        # A late item stays in the heap where it stood while it was in time.
        if place.is_waiting and not (place.is_late and key is place.rank):
            return place
        heapq.heappop(heap)
    return None


def _is_parked(queue: _TenantQueue[T]) -> bool:
    """Return whether the queue has stood behind all others, so that its counter is out of date."""
    return queue.yields and _first(queue.heap) is None


def _late_rank(place: Place[T]) -> Rank:
    """Return the key of an item among those that are late: its priority, then its deadline."""
    return place.rank[0], place.deadline_s, place.number


class FairQueue(Generic[T]):
    """All items in line. Event loop only."""

    def __init__(self, *, late_share: float = 0.0) -> None:
        """`late_share`: largest share of a tenant's work that goes to late items while others wait."""
        self._late_share = late_share
        self._queues: dict[str, _TenantQueue[T]] = {}
        self._first: _TenantQueue[T] = _TenantQueue(weight=1.0)
        self._last_left = self._first
        """Queue that emptied last; its counter is the floor for newcomers to an empty line."""

    def __len__(self) -> int:
        return self._first.num_waiting + sum(queue.num_waiting for queue in self._queues.values())

    @property
    def num_first(self) -> int:
        """Number of items before all newcomers."""
        return self._first.num_waiting

    def add_tenant(self, name: str, *, weight: float, yields: bool = False) -> None:
        """Make a tenant known; if it `yields`, its late items go after those of all tenants. Harmless when repeated."""
        if name not in self._queues:
            self._queues[name] = _TenantQueue(weight=weight, late_share=self._late_share, yields=yields)

    def counter(self, tenant: str) -> float:
        """Return the tenant's weighted service."""
        return self._queues[tenant].counter

    def push(
        self,
        item: T,
        *,
        tenant: str,
        rank: Rank,
        due_s: float = math.inf,
        deadline_s: float = math.inf,
        work_s: float = 0.0,
    ) -> Place[T]:
        """Add a newcomer to the queue of its tenant; after `due_s` it goes behind those that are not late."""
        queue = self._queues[tenant]
        if not queue.contends or _is_parked(queue):
            self._lift(queue)
        place = Place(item, tenant, queue, rank, due_s, work_s, deadline_s)
        queue.add(place)
        place.count_in(queue.work, rank)
        return place

    def push_first(self, item: T, *, number: int, work_s: float = 0.0) -> Place[T]:
        """Add an item that was served before in front of all newcomers, in order of `number`."""
        place = Place(item, FIRST, self._first, (number,), work_s=work_s)
        self._first.add(place)
        place.count_in(self._first.work, place.rank)
        return place

    def work_before_s(self, place: Place[T], *, now_s: float) -> float:
        """Return the work that will be served before a waiting item if no others come.

        Other tenants get their shares meanwhile, and no more than waits there.
        """
        queue = place.queue
        if queue is self._first:
            return queue.work.before_s(place.rank)
        if not place.is_late and place.due_s >= now_s:
            own_s = queue.work.before_s(place.rank)
        else:
            own_s = queue.work.total_s + queue.late_work.before_s(_late_rank(place))
        before_s = self._first.work.total_s + own_s
        for other in self._queues.values():
            if other is not queue and other.contends:
                share_s = (own_s + place.work_s) * other.weight / queue.weight
                before_s += min(share_s, other.work.total_s + other.late_work.total_s)
        return before_s

    def pop(self, *, now_s: float, skipping: Container[str] = ()) -> Place[T] | None:
        """Take out the next item of the tenants that are not skipped; None when there is none."""
        if self._first.num_waiting and FIRST not in skipping:
            return self._first.take(now_s)
        queues = [queue for name, queue in self._queues.items() if queue.contends and name not in skipping]
        queues = [queue for queue in queues if not queue.is_behind(now_s)] or queues
        if not queues:
            return None
        queue = min(queues, key=lambda queue: queue.counter)
        place = queue.take(now_s)
        self._note_left(queue)
        return place

    def grant(self, place: Place[T], work: float) -> None:
        """Note that an item that was taken out is served, and how much work it is in the units of `charge`."""
        place.queue.grant(place, work)
        place.uncount()

    def restore(self, place: Place[T]) -> None:
        """Put an item that was taken out back at the same place; the counters stay as they are."""
        place.queue.restore(place)

    def restore_late(self, place: Place[T]) -> None:
        """Put an item that was taken out back among the late ones, because it is going to be late."""
        place.queue.note_late(place)
        place.queue.restore(place)

    def discard(self, place: Place[T]) -> None:
        """Remove an item. Harmless when it is not in line."""
        place.uncount()
        if place.is_waiting:
            place.queue.remove(place)
            self._note_left(place.queue)

    def charge(self, tenant: str, cost: float) -> None:
        """Count service of the tenant, in tokens weighted by their cost; a negative cost takes back."""
        queue = self._queues[tenant]
        queue.counter += cost / queue.weight

    def hold(self, tenant: str) -> None:
        """Skip the tenant until `release`, because it has all that it may have at once."""
        queue = self._queues[tenant]
        queue.is_held = True
        self._note_left(queue)

    def release(self, tenant: str) -> None:
        """End a hold; the tenant returns as after a pause."""
        queue = self._queues[tenant]
        if queue.is_held:
            self._lift(queue)
            queue.is_held = False

    def _lift(self, queue: _TenantQueue[T]) -> None:
        lowest = min(
            (other.counter for other in self._queues.values() if other.contends and not _is_parked(other)),
            default=self._last_left.counter,
        )
        queue.counter = max(queue.counter, lowest)

    def _note_left(self, queue: _TenantQueue[T]) -> None:
        if queue is not self._first and not queue.contends:
            self._last_left = queue

"""The order of the line: weighted fair between tenants, size-aware with ageing within one.

Between tenants: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
Each tenant has a counter of the tokens that it was served, divided by its weight; the waiting tenant with the lowest
counter goes next. A tenant that comes back after a pause is lifted to the lowest counter of the waiting ones, so it
cannot save up its share. The weighted service of two tenants that both keep waiting then differs by no more than what
is in flight at once, whatever their requests look like.

Within a tenant: higher priority first; then least `work_s + AGEING * due_s`, where `due_s` is the latest time at which
the computation may begin and still be in time for the first token; without an objective, the arrival. A long prompt
gives way to short ones, but only to those that arrive within `work_s / AGEING` seconds after it. Requests age alike,
so the order of two waiting requests never changes, and a heap holds it.

Requests that are too late for their objective go behind all others: under overload, serving every request late serves
none. They go in order of arrival when no others wait, and at every LATE_TURN-th grant in any case, so none starves.

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
LATE_TURN = 64
"""Out of this many plans of a tenant, one goes to a request that is late already."""
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


@dataclass(slots=True, eq=False)
class _TenantQueue(Generic[T]):
    """Items of one tenant."""

    weight: float
    heap: list[tuple[Rank, int, Place[T]]] = field(default_factory=list)
    """Includes places that are no longer waiting. The second entry breaks ties by arrival: samples of one request that
    lost their workers have equal ranks."""
    late: list[tuple[Rank, int, Place[T]]] = field(default_factory=list)
    """Items that were found late."""
    work: QueuedWork = field(default_factory=QueuedWork)
    """Work of the waiting items that were not found late."""
    late_work: QueuedWork = field(default_factory=QueuedWork)
    num_added: int = 0
    num_waiting: int = 0
    num_granted: int = 0
    counter: float = 0.0
    is_held: bool = False

    @property
    def contends(self) -> bool:
        return self.num_waiting > 0 and not self.is_held

    def add(self, place: Place[T]) -> None:
        place.is_waiting = True
        self.num_added += 1
        heapq.heappush(self.heap, (place.rank, self.num_added, place))
        self.num_waiting += 1

    def remove(self, place: Place[T]) -> None:
        place.is_waiting = False
        self.num_waiting -= 1
        if len(self.heap) + len(self.late) > max(2 * self.num_waiting, _MIN_STALE):
            for heap in (self.heap, self.late):
                heap[:] = [entry for entry in heap if entry[-1].is_waiting]
                heapq.heapify(heap)

    def take(self, now_s: float) -> Place[T]:
        place = self._next(now_s)
        place.is_waiting = False
        self.num_waiting -= 1
        return place

    def _next(self, now_s: float) -> Place[T]:
        if self.num_granted % LATE_TURN == LATE_TURN - 1:
            while self.late:
                _rank, _order, place = heapq.heappop(self.late)
                if place.is_waiting:
                    return place
        while self.heap:
            _rank, order, place = heapq.heappop(self.heap)
            if not place.is_waiting:
                continue
            if place.due_s >= now_s:
                return place
            late_rank = _late_rank(place)
            heapq.heappush(self.late, (late_rank, order, place))
            place.count_in(self.late_work, late_rank)
        while True:
            _rank, _order, place = heapq.heappop(self.late)
            if place.is_waiting:
                return place


def _late_rank(place: Place[T]) -> Rank:
    """Return the key of an item among those that are late: its priority, then its arrival."""
    return place.rank[0], place.rank[-1]


class FairQueue(Generic[T]):
    """All items in line. Event loop only."""

    def __init__(self) -> None:
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

    def add_tenant(self, name: str, *, weight: float) -> None:
        """Make a tenant known. Harmless when repeated."""
        if name not in self._queues:
            self._queues[name] = _TenantQueue(weight=weight)

    def counter(self, tenant: str) -> float:
        """Return the tenant's weighted service."""
        return self._queues[tenant].counter

    def push(self, item: T, *, tenant: str, rank: Rank, due_s: float = math.inf, work_s: float = 0.0) -> Place[T]:
        """Add a newcomer to the queue of its tenant; after `due_s` it goes behind those that are not late."""
        queue = self._queues[tenant]
        if not queue.contends:
            self._lift(queue)
        place = Place(item, tenant, queue, rank, due_s, work_s)
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
        if place.due_s >= now_s:
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
        if not queues:
            return None
        queue = min(queues, key=lambda queue: queue.counter)
        place = queue.take(now_s)
        self._note_left(queue)
        return place

    def grant(self, place: Place[T]) -> None:
        """Note that an item that was taken out has been served."""
        place.queue.num_granted += 1
        place.uncount()

    def restore(self, place: Place[T]) -> None:
        """Put an item that was taken out back at the same place; the counters stay as they are."""
        place.queue.add(place)

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
            (other.counter for other in self._queues.values() if other.contends), default=self._last_left.counter
        )
        queue.counter = max(queue.counter, lowest)

    def _note_left(self, queue: _TenantQueue[T]) -> None:
        if queue is not self._first and not queue.contends:
            self._last_left = queue

"""The order of the line: weighted fair between tenants, size-aware with ageing inside one.

Between tenants: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
Each tenant has a counter of the tokens that it was served, divided by its weight; the waiting tenant with the lowest
counter goes next. A tenant that comes back after a pause is lifted to the lowest counter among those that wait, so
that it cannot save up its share. Then the weighted service of two tenants that both keep waiting differs by no more
than what is in flight at once, whatever their requests look like.

Inside a tenant: higher priority first; then least `work_s + AGEING * due_s`. What is due is the latest moment at which
the computation may begin and still bring the first token in time; without an objective, the arrival. A long prompt
gives way to short ones, but only to those that come within `work_s / AGEING` seconds after it. Everybody ages alike, so
that the order of two that wait never changes, and a heap holds it.

Who cannot be in time any more stands behind all who can: under overload, serving everybody late serves nobody. They go
in order of arrival when nobody else waits, and every LATE_TURN-th time even when others do, so that nobody starves.

Every operation costs O(log n + tenants), however many wait.
"""

import heapq
import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

AGEING = 0.3
"""Seconds of prefill that a second of waiting outweighs."""
LATE_TURN = 64
"""Of so many plans of a tenant, one is for somebody who is late already."""
PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
FIRST = ""
"""Those that stand before all newcomers, for `pop(skipping=…)`."""
_MIN_STALE = 64

T = TypeVar("T")
Rank = tuple[float, ...]


def rank(*, priority: int, work_s: float, due_s: float, number: int) -> Rank:
    """Return the key of a request inside its tenant; low goes first, and no two are equal."""
    return (-priority, work_s + AGEING * due_s, number)


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """Somebody's place in line."""

    item: T
    tenant: str
    """"" for those that stand before all newcomers."""
    line: "_Line[T]"
    rank: Rank
    due_s: float = math.inf
    """When it is too late to be in time."""
    is_waiting: bool = False
    """In the line just now; `pop` takes out."""


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """Those of one tenant."""

    weight: float
    heap: list[tuple[Rank, int, Place[T]]] = field(default_factory=list)
    """With places that are no longer waited in. Samples of one request that lost their workers rank alike: among them
    who came first goes first."""
    late: list[tuple[Rank, int, Place[T]]] = field(default_factory=list)
    """Those that cannot be in time any more."""
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
            heapq.heappush(self.late, ((place.rank[0], place.rank[-1]), order, place))
        while True:
            _rank, _order, place = heapq.heappop(self.late)
            if place.is_waiting:
                return place


class FairQueue(Generic[T]):
    """Everybody in line. Event loop only."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._first: _Line[T] = _Line(weight=1.0)
        self._last_left = self._first
        """Who ceased to wait last: what a newcomer to an empty line is lifted to."""

    def __len__(self) -> int:
        return self._first.num_waiting + sum(line.num_waiting for line in self._lines.values())

    @property
    def num_first(self) -> int:
        """Those that stand before all newcomers."""
        return self._first.num_waiting

    def add_tenant(self, name: str, *, weight: float) -> None:
        """Make a tenant known. Harmless when repeated."""
        if name not in self._lines:
            self._lines[name] = _Line(weight=weight)

    def counter(self, tenant: str) -> float:
        """Return the tenant's weighted service."""
        return self._lines[tenant].counter

    def push(self, item: T, *, tenant: str, rank: Rank, due_s: float = math.inf) -> Place[T]:
        """Let a newcomer stand in its tenant's line; after `due_s` it stands behind those who can still be in time."""
        line = self._lines[tenant]
        if not line.contends:
            self._lift(line)
        place = Place(item, tenant, line, rank, due_s)
        line.add(place)
        return place

    def push_first(self, item: T, *, number: int) -> Place[T]:
        """Let somebody who was on already stand before all newcomers, in order of `number`."""
        place = Place(item, FIRST, self._first, (number,))
        self._first.add(place)
        return place

    def pop(self, *, now_s: float, skipping: Container[str] = ()) -> Place[T] | None:
        """Take out who goes next, of the tenants that are not skipped; None when there is nobody."""
        if self._first.num_waiting and FIRST not in skipping:
            return self._first.take(now_s)
        lines = [line for name, line in self._lines.items() if line.contends and name not in skipping]
        if not lines:
            return None
        line = min(lines, key=lambda line: line.counter)
        place = line.take(now_s)
        self._note_left(line)
        return place

    def grant(self, place: Place[T]) -> None:
        """Who was taken out last has got what it waited for."""
        place.line.num_granted += 1

    def restore(self, place: Place[T]) -> None:
        """Put somebody who was taken out back, at the same place. No more than a look: the counters stay."""
        place.line.add(place)

    def discard(self, place: Place[T]) -> None:
        """Somebody leaves the line. Harmless for one who is not in it."""
        if place.is_waiting:
            place.line.remove(place)
            self._note_left(place.line)

    def charge(self, tenant: str, cost: float) -> None:
        """Count service of the tenant, or take back what was counted too much: tokens, weighted by their cost."""
        line = self._lines[tenant]
        line.counter += cost / line.weight

    def hold(self, tenant: str) -> None:
        """Let nobody of the tenant go next until `release`: it has all that it may have at once."""
        line = self._lines[tenant]
        line.is_held = True
        self._note_left(line)

    def release(self, tenant: str) -> None:
        """End a hold; the tenant comes back as after a pause."""
        line = self._lines[tenant]
        if line.is_held:
            self._lift(line)
            line.is_held = False

    def _lift(self, line: _Line[T]) -> None:
        lowest = min(
            (other.counter for other in self._lines.values() if other.contends), default=self._last_left.counter
        )
        line.counter = max(line.counter, lowest)

    def _note_left(self, line: _Line[T]) -> None:
        if line is not self._first and not line.contends:
            self._last_left = line

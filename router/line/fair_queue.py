"""The order of the line: weighted fair between tenants, by size and lateness within one (tenant_queue.py).

Tenants go in the order of virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 24).
Each tenant has a counter of the tokens that it was served, divided by its weight; the waiting tenant with the lowest
counter goes next. A tenant that comes back after a pause is lifted to the lowest counter of the waiting ones, so it
cannot save up its share. The weighted service of two tenants that both keep waiting then differs by no more than what
is in flight at once, whatever their requests look like. While something else is scarce, the tenant with the least of it
for its weight goes next, and counters decide between equal ones. A tenant that *yields* goes after all others while all
its requests are late; to have waited there counts as a pause.

Every operation costs O(log n + tenants) for n waiting requests, and each further item of one round O(log n). What is
before a request is known from running sums (queued_work.py), for forecasts of its wait.
"""

import heapq
from collections.abc import Callable, Container, Iterator
from typing import Generic

from router.line.tenant_queue import P, TenantQueue, late_rank

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
FIRST = ""
"""Name of the queue before all newcomers, for `pop(skipping=…)`."""


class FairQueue(Generic[P]):
    """All items in line. Event loop only."""

    def __init__(self, *, late_share: float = 0.0) -> None:
        """`late_share`: largest share of a tenant's work that goes to late items while others wait."""
        self._late_share = late_share
        self._queues: dict[tuple[str, bool], TenantQueue[P]] = {}
        """By tenant, and whether a hold of the tenant spares what is in there."""
        self._first: TenantQueue[P] = TenantQueue(name=FIRST, weight=1.0)
        self._last_left = self._first
        """Queue that emptied last; its counter is the floor for newcomers to an empty line."""

    def __len__(self) -> int:
        return self._first.num_waiting + sum(queue.num_waiting for queue in self._queues.values())

    def add_tenant(self, name: str, *, weight: float, yields: bool = False) -> None:
        """Make a tenant known; if it `yields`, its late items go after those of all tenants. Harmless when repeated."""
        if (name, False) not in self._queues:
            self._queues[name, False] = TenantQueue(
                name=name, weight=weight, late_share=self._late_share, yields=yields
            )

    def counter(self, tenant: str) -> float:
        """Return the tenant's weighted service."""
        return self._queues[tenant, False].counter

    def push(self, place: P, *, tenant: str, is_spared: bool = False) -> None:
        """Add one to the queue of its tenant; after its `due_s` it goes behind those that are not late.

        One that `is_spared` is served during a hold, too, and before the tenant's others while their service is equal.
        """
        queue = self._queues.get((tenant, is_spared))
        if queue is None:
            own = self._queues[tenant, False]
            queue = TenantQueue(name=tenant, weight=own.weight, counter=own.counter)
            self._queues[tenant, True] = queue
        if not queue.contends or queue.is_parked:
            self._lift(queue)
        queue.add(place)
        place.count_in(queue.work, place.rank)

    def push_first(self, place: P) -> None:
        """Add one that was served before in front of all newcomers, in the order of its rank."""
        self._first.add(place)
        place.count_in(self._first.work, place.rank)

    def work_before_s(self, place: P, *, now_s: float) -> float:
        """Return the work that will be served before a waiting item if no others come.

        Other tenants get their shares meanwhile, and no more than waits there.
        """
        queue = place.queue
        if queue is self._first:
            return queue.work.before_s(place.rank)
        if not place.is_late and place.due_s >= now_s:
            own_s = queue.work.before_s(place.rank)
        else:
            own_s = queue.work.total_s + queue.late_work.before_s(late_rank(place))
        before_s = self._first.work.total_s + own_s
        for other in self._queues.values():
            if other is not queue and other.contends:
                share_s = (own_s + place.work_s) * other.weight / queue.weight
                before_s += min(share_s, other.work.total_s + other.late_work.total_s)
        return before_s

    def num_before(self, before_s: float) -> float:
        """Return about how many waiting items are `before_s` of work: as many as the mean of all says."""
        works = (work for queue in (self._first, *self._queues.values()) for work in (queue.work, queue.late_work))
        total_s = sum(work.total_s for work in works)
        return len(self) * before_s / total_s if total_s else 0.0

    def pop(self, *, now_s: float, skipping: Container[str] = ()) -> P | None:
        """Take out the next item of the tenants that are not skipped; None when there is none."""
        return next(self.round(now_s=now_s, skipping=skipping), None)

    def round(
        self, *, now_s: float, skipping: Container[str], share: Callable[[str], float] | None = None
    ) -> Iterator[P]:
        """Take out one item after the other, each the next one of the tenants that are not skipped by then.

        `share` returns what a tenant has of something scarce: the one with the least for its weight is next then, and
        counters decide between equal ones. Meanwhile `skipping` may only grow, and no counter may fall; a share that
        falls counts from the next round on. A tenant that begins to wait after the first item is left out.
        """

        def turn_of(queue: TenantQueue[P]) -> tuple[bool, float, float]:
            is_parked, counter = queue.turn(now_s)
            return is_parked, 0.0 if share is None else share(queue.name) / queue.weight, counter

        while self._first.num_waiting and FIRST not in skipping:
            yield self._first.take(now_s)
        waiting = [
            (*turn_of(queue), not is_spared, idx, queue)
            for idx, ((_, is_spared), queue) in enumerate(self._queues.items())
            if queue.contends and queue.name not in skipping
        ]
        heapq.heapify(waiting)
        while waiting:
            *turn, is_last, idx, queue = waiting[0]
            if not queue.contends or queue.name in skipping:
                heapq.heappop(waiting)
            elif (now := turn_of(queue)) != tuple(turn):
                heapq.heapreplace(waiting, (*now, is_last, idx, queue))
            else:
                place = queue.take(now_s)
                self._note_left(queue)
                yield place

    def take(self, place: P) -> None:
        """Take out a waiting item, whatever is before it."""
        place.queue.remove(place)
        self._note_left(place.queue)

    def grant(self, place: P, work: float) -> None:
        """Note that an item that was taken out is served, and how much work it is in the units of `charge`."""
        place.queue.grant(place, work)
        place.uncount()

    def restore(self, place: P) -> None:
        """Put an item that was taken out back at the same place; the counters stay as they are."""
        place.queue.restore(place)

    def restore_late(self, place: P) -> None:
        """Put an item that was taken out back among the late ones, because it is going to be late."""
        place.queue.note_late(place)
        place.queue.restore(place)

    def discard(self, place: P) -> None:
        """Remove an item. Harmless when it is not in line."""
        place.uncount()
        if place.is_waiting:
            self.take(place)

    def charge(self, tenant: str, cost: float) -> None:
        """Count service of the tenant, in tokens weighted by their cost; a negative cost takes back."""
        for is_spared in (False, True):
            queue = self._queues.get((tenant, is_spared))
            if queue is not None:
                queue.counter += cost / queue.weight

    def hold(self, tenant: str) -> None:
        """Skip the tenant until `release`, because it has all that it may have at once."""
        queue = self._queues[tenant, False]
        queue.is_held = True
        self._note_left(queue)

    def release(self, tenant: str) -> None:
        """End a hold; the tenant returns as after a pause."""
        queue = self._queues[tenant, False]
        if queue.is_held:
            self._lift(queue)
            queue.is_held = False

    def _lift(self, queue: TenantQueue[P]) -> None:
        lowest = min(
            (other.counter for other in self._queues.values() if other.contends and not other.is_parked),
            default=self._last_left.counter,
        )
        queue.counter = max(queue.counter, lowest)

    def _note_left(self, queue: TenantQueue[P]) -> None:
        if queue is not self._first and not queue.contends:
            self._last_left = queue

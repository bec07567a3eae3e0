"""Shares of tenants in the decode pool, and the answers that are set back when another tenant has too little.

The *load* of a tenant is its share of the pool's places or of its pages, whichever is larger, divided by its weight
(Ghodsi et al., "Dominant Resource Fairness", NSDI 11). A request for which no worker has room may take the room of
answers on one worker whose tenants have a higher load than its own tenant would have with it, and more than the mean.
A full line gives its places away by the same rule (`record/account.py`), and for the same reasons:

1. A tenant alone may use the whole pool, and a tenant that comes gets its share of it without waiting for an end.
2. No tenant is taken below its share: it has more than the mean until the last answer is taken from it.
3. Two tenants never take the same room from each other in turn: what was set back would come back with the higher load.

Of the tenant with the highest load the latest arrival goes first, and several samples last, so its earliest answer goes
on in any case. One that runs again stays for STAY_S, each time twice as long: their number is bounded, and every answer
ends.

A router compares and sets back the answers that it runs itself. Those of other routers are taken room to it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from common.clock import Clock
from common.ids import WorkerId
from router.fleet.booking import Booking
from router.fleet.fleet import Fleet
from router.placement.answer_pool import AnswerPool
from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.tenants import Tenant


@dataclass(slots=True, eq=False, kw_only=True)
class _Use:
    """Share of a tenant in the pool."""

    weight: float
    num_places: int = 0
    num_blocks: float = 0.0

    def add(self, num_places: int, num_blocks: float) -> None:
        self.num_places += num_places
        self.num_blocks += num_blocks


class Shares:
    """What tenants have of the decode pool, as of the last `measure`. Event loop only."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self._num_places = self._num_blocks = 1.0
        """Places and pages of the pool; infinite places where a worker does not bound them."""
        self.is_leaving = False
        """Whether an answer that was set back still has its room."""

    def measure(self, claims: Iterable[PlacementRequest]) -> None:
        """Add up what tenants have now, with the requests in `claims`, and without answers that were set back."""
        decode = self._fleet.roster.decode
        self._num_places = max(1.0, float((decode.num_free_slots + decode.num_decodes).sum()))
        self._num_blocks = max(1.0, float(decode.num_blocks.sum()))
        self._uses.clear()
        self.is_leaving = False
        for booking in self._fleet.bookings:
            if booking.is_set_back:
                self.is_leaving = True
            elif booking.plan.pool is AnswerPool.DECODE:
                self._use(booking.tenant).add(booking.answering.num_decodes, booking.num_filled_blocks)
        for request in claims:
            self.add(request)

    def add(self, request: PlacementRequest) -> None:
        """Count a request that is given room."""
        if request.pool is AnswerPool.DECODE:
            self._use(request.tenant).add(request.num_decodes, request.num_decode_blocks)

    def has_places(self, request: PlacementRequest) -> bool:
        """Return whether a worker reports places for a request."""
        return bool((self._fleet.roster.decode.num_free_slots >= request.num_samples).any())

    def with_a_place(self, tenant: str) -> float:
        """Return what share of the pool a tenant would have with one more place; not divided by its weight."""
        use = self._uses.get(tenant, _Use(weight=1.0))
        return max((use.num_places + 1) / self._num_places, use.num_blocks / self._num_blocks)

    def find_victims(self, request: PlacementRequest, *, replaces: bool) -> list[Booking]:
        """Return the fewest answers on one worker that may be set back for a request and whose room suffices, or none.

        `replaces`: a worker takes it only in place of others, whatever is free.
        """
        own = replace(self._use(request.tenant))
        own.add(request.num_decodes, request.num_decode_blocks)
        uses = {**self._uses, request.tenant.name: own}
        mean = sum(self._load(use) * use.weight for use in uses.values()) / sum(use.weight for use in uses.values())
        limit = max(self._load(own), mean)
        above = {name for name, use in uses.items() if self._load(use) > limit}
        candidates = defaultdict[WorkerId, list[Booking]](list)
        for booking in self._fleet.bookings if above else ():
            if booking.tenant.name in above and booking.may_go(self._clock.monotonic()):
                candidates[booking.plan.answering].append(booking)
        found = [
            self._find_on(worker, request, candidates[worker.worker_id], limit=limit, replaces=replaces)
            for worker in self._fleet.roster.decode
            if worker.worker_id in candidates
        ]
        return min(filter(None, found), key=len, default=[])

    def _find_on(
        self,
        worker: ProjectedLoad,
        request: PlacementRequest,
        answers: list[Booking],
        *,
        limit: float,
        replaces: bool,
    ) -> list[Booking]:
        """Return answers of one worker, of tenants above the limit, whose room suffices; none when it does not."""
        left = defaultdict[str, list[Booking]](list)
        for answer in sorted(answers, key=lambda each: (-each.answering.num_decodes, each.number)):
            left[answer.tenant.name].append(answer)
        uses = {tenant: replace(self._uses[tenant]) for tenant in left}
        num_places = 0.0 if replaces else worker.num_free_slots
        num_gone, num_gone_blocks = 0, 0.0
        victims: list[Booking] = []
        while num_places < request.num_samples or not worker.has_pages(
            num_blocks=request.num_decode_blocks,
            num_growth_blocks=request.num_growth_blocks,
            num_gone=num_gone,
            num_gone_blocks=num_gone_blocks,
        ):
            tenant = max(filter(left.get, left), key=lambda each: self._load(uses[each]), default=None)
            if tenant is None or self._load(uses[tenant]) <= limit:
                return []
            victim = left[tenant].pop()
            victims.append(victim)
            num_places += victim.answering.num_decodes
            num_gone += victim.answering.num_decodes
            num_gone_blocks += victim.num_filled_blocks
            uses[tenant].add(-victim.answering.num_decodes, -victim.num_filled_blocks)
        return victims

    def _use(self, tenant: Tenant) -> _Use:
        return self._uses.setdefault(tenant.name, _Use(weight=tenant.weight))

    def _load(self, use: _Use) -> float:
        return max(use.num_places / self._num_places, use.num_blocks / self._num_blocks) / use.weight

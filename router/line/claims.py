"""Claims to the decode pool: a request of a tenant with too little there has answers of others set back.

A claim stands until its request has a plan, leaves, or CLAIM_S have passed. Meanwhile no other request gets a plan in
that pool, so that the room goes to the request for which it was made. Which answers may be set back is for
`router.choosing.shares` to say.
"""

import math

from common.clock import Clock
from router.choosing.shares import Shares
from router.fleet.fleet import Fleet
from router.line.admission import Admission
from router.line.lanes import tenant_of
from router.line.tenant_queue import Place
from router.placement.answer_pool import AnswerPool
from router.placement.plans import PlacementRequest
from router.record.ticket import QueuedRequest

CLAIM_S = 2.0
"""How long a claim stands at most; workers give room back within a step and a report."""
RETRY_S = 0.1
"""Pause before a request looks again for answers that may be set back; longer than a step and a report."""
MAX_FAILED = 4
"""Requests that may look in vain for such answers in one search of the line."""


class Claims:
    """Claims that stand. Event loop only."""

    def __init__(self, *, admission: Admission, fleet: Fleet, clock: Clock) -> None:
        self._admission = admission
        self._clock = clock
        self._shares = Shares(fleet, clock)
        self._until_s: dict[Place[QueuedRequest], float] = {}
        """When each claim ends that stands."""
        self._is_measured = False
        """Whether the shares were measured in this search of the line."""
        self._num_failed = 0
        """Requests that have looked in vain in this search."""

    def standing(self) -> list[Place[QueuedRequest]]:
        """Begin a search of the line: return the requests whose claims stand, in the order of the claims."""
        self._is_measured, self._num_failed = False, 0
        now_s = self._clock.monotonic()
        for place, until_s in list(self._until_s.items()):
            if not place.is_waiting or place.item.is_settled or until_s <= now_s:
                self.end(place)
        return list(self._until_s)

    @property
    def ends_s(self) -> float:
        """Time at which the first claim ends; infinite without any."""
        return min(self._until_s.values(), default=math.inf)

    def end(self, place: Place[QueuedRequest]) -> None:
        """Let others have the room."""
        del self._until_s[place]

    def with_a_place(self, lane: str) -> float:
        """Return what share of the pool the tenant of a lane would have with one more place."""
        self._measure()
        return self._shares.with_a_place(tenant_of(lane))

    def note_plan(self, request: PlacementRequest) -> None:
        """Count a request that has got a plan."""
        self._shares.add(request)

    def make(self, place: Place[QueuedRequest]) -> bool:
        """Set answers back for a request that was refused, if it may have their room; returns whether it may."""
        queued, request, now_s = place.item, place.item.search.request, self._clock.monotonic()
        may_look = queued.lacks_room and now_s >= queued.claims_again_s and self._num_failed < MAX_FAILED
        if request.pool is AnswerPool.PREFILL or not may_look:
            return False
        self._measure()
        # Where the gaps of running answers close a full pool, one answer goes for one that comes.
        victims = self._shares.find_victims(request, replaces=not queued.search.needs_room)
        for victim in victims:
            victim.set_back()
            self._admission.note_set_back(victim.tenant)
        queued.claims_again_s = now_s + RETRY_S
        if victims:
            self._until_s[place] = now_s + CLAIM_S
            self._is_measured = False
        else:
            self._num_failed += 1
        return bool(victims)

    def renew(self, place: Place[QueuedRequest]) -> None:
        """Set further answers back when a claim's pages have gone to the growth of those that stayed, else end it."""
        self._measure()
        has_left = not self._shares.is_leaving and self._shares.has_places(place.item.search.request)
        if not has_left or self._clock.monotonic() < place.item.claims_again_s:
            return
        until_s = self._until_s.pop(place)
        self._is_measured = False
        if self.make(place):
            self._until_s[place] = until_s

    def _measure(self) -> None:
        if not self._is_measured:
            self._shares.measure(place.item.search.request for place in self._until_s)
            self._is_measured = True

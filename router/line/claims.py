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
from router.line.wait import Wait
from router.placement.plans import PlacementRequest

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
        self._until_s: dict[Wait, float] = {}
        """When each claim ends that stands."""
        self._is_measured = False
        """Whether the shares were measured in this search of the line."""
        self._num_failed = 0
        """Requests that have looked in vain in this search."""

    def standing(self) -> list[Wait]:
        """Begin a search of the line: return the requests whose claims stand, in the order of the claims."""
        self._is_measured, self._num_failed = False, 0
        now_s = self._clock.monotonic()
        for wait, until_s in list(self._until_s.items()):
            if not wait.is_waiting or wait.is_settled or until_s <= now_s:
                self.end(wait)
        return list(self._until_s)

    @property
    def ends_s(self) -> float:
        """Time at which the first claim ends; infinite without any."""
        return min(self._until_s.values(), default=math.inf)

    def end(self, wait: Wait) -> None:
        """Let others have the room."""
        del self._until_s[wait]

    def with_a_place(self, tenant: str) -> float:
        """Return what share of the pool a tenant would have with one more place."""
        self._measure()
        return self._shares.with_a_place(tenant)

    def note_plan(self, request: PlacementRequest) -> None:
        """Count a request that has got a plan."""
        self._shares.add(request)

    def make(self, wait: Wait) -> bool:
        """Set answers back for a request that was refused, if it may have their room; returns whether it may."""
        request, retry, now_s = wait.request, wait.retry, self._clock.monotonic()
        may_look = now_s >= wait.claims_again_s and self._num_failed < MAX_FAILED
        if retry is None or not (retry.lacks_room and may_look):
            return False
        self._measure()
        # Where the gaps of running answers close a full pool, one answer goes for one that comes.
        victims = self._shares.find_victims(request, replaces=not retry.needs_room)
        for victim in victims:
            victim.set_back()
            self._admission.note_set_back(victim.tenant.name)
        wait.claims_again_s = now_s + RETRY_S
        if victims:
            self._until_s[wait] = now_s + CLAIM_S
            self._is_measured = False
        else:
            self._num_failed += 1
        return bool(victims)

    def renew(self, wait: Wait) -> None:
        """Set further answers back when a claim's pages have gone to the growth of those that stayed, else end it."""
        self._measure()
        has_left = not self._shares.is_leaving and self._shares.has_places(wait.request)
        if not has_left or self._clock.monotonic() < wait.claims_again_s:
            return
        until_s = self._until_s.pop(wait)
        self._is_measured = False
        if self.make(wait):
            self._until_s[wait] = until_s

    def _measure(self) -> None:
        if not self._is_measured:
            self._shares.measure(wait.request for wait in self._until_s)
            self._is_measured = True

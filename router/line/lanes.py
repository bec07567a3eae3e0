"""Lanes of the line: a tenant's requests by the pool that answers them, and those that were set back."""

from router.line.fair_queue import FIRST
from router.line.tenant_queue import Place
from router.placement.answer_pool import AnswerPool
from router.placement.plans import PlacementRequest
from router.record.ticket import QueuedRequest, Ticket

_SUFFIXES = {AnswerPool.DECODE: "", AnswerPool.PREFILL: "\0embedding"}
_SET_BACK = "\0set back"
"""Ends of the names of lanes."""


def lanes_of(tenant: str) -> tuple[str, ...]:
    """Return the names under which a tenant's requests stand in line.

    All service of the tenant counts in all of its lanes: several get it no larger share.
    """
    return set_back_lane_of(tenant), *newcomers_lanes_of(tenant)


def newcomers_lanes_of(tenant: str) -> tuple[str, ...]:
    """Return the lanes of a tenant's requests by pool: none waits behind one for which another pool has no plan."""
    return tuple(tenant + suffix for suffix in _SUFFIXES.values())


def set_back_lane_of(tenant: str) -> str:
    """Return the lane of a tenant's requests that were set back: they have had a plan, so no limit holds them."""
    return tenant + _SET_BACK


def lane_of(tenant: str, request: PlacementRequest) -> str:
    """Return the name of the lane in which a newcomer of a tenant stands."""
    return tenant + _SUFFIXES[request.pool]


def tenant_of(lane: str) -> str:
    """Return the tenant whose requests stand in a lane."""
    return lane.partition("\0")[0]


def share_of(lane: str, ticket: Ticket) -> float:
    """Return the share of a request's service that counts in a lane: a little less in the one where it did not stand.

    So lanes of one tenant, whose counters are nearly equal, get equal service while both wait.
    """
    return 1.0 if ticket.lane in ("", lane) else 0.999


class SkippedLanes:
    """Lanes that get no more plans in one round: single ones, and all of a pool for which a request must not be passed.

    A `Container` for `FairQueue.pop`.
    """

    def __init__(self) -> None:
        self.lanes: set[str] = set()
        self._closed: set[AnswerPool] = set()

    def close_pool(self, pool: AnswerPool) -> None:
        """Skip every newcomer that is answered by a pool."""
        self._closed.add(pool)

    def close(self, place: Place[QueuedRequest]) -> None:
        """Skip every request that is answered by the same pool as this one."""
        self._closed.add(place.item.search.request.pool)
        if place.tenant == FIRST:
            self.lanes.add(FIRST)

    def __contains__(self, lane: object) -> bool:
        if lane == FIRST or lane in self.lanes:
            return lane in self.lanes
        embeds = str(lane).endswith(_SUFFIXES[AnswerPool.PREFILL])
        return (AnswerPool.PREFILL if embeds else AnswerPool.DECODE) in self._closed

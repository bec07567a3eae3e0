"""A request's ticket, and its wait for a plan."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.errors import EngineFault, RefusalCause, Refused
from router.choosing.chooser import Search
from router.fleet.decisions import Booking
from router.placement.calibration import DurationForecast
from router.placement.waits import NO_WAITS, Waits
from router.record.account import Account, Service
from router.tenants import Terms


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """The right of one request to be served, kept until it ends. Leaving its `with` block gives it up."""

    number: int
    """Position in the order of arrival."""
    account: Account
    terms: Terms
    received_s: float
    on_close: "Callable[[Ticket], None]"
    expected: Service = field(default_factory=Service)
    """Charge to the token rate of its tenant."""
    service: Service = field(default_factory=Service)
    """Charge to the share of its tenant."""
    has_plan: bool = False
    """The request has had a plan that no worker refused: no limit refuses it any more, and it goes before newcomers
    unless it was set back."""
    is_returned: bool = False
    """A worker has refused its plan, so that it waits, or has waited, again. No limit refuses it any more."""
    displaced: Refused | None = None
    """Set when another tenant's request took its place before it had a plan; the refusal that its client gets."""
    queued: "set[QueuedRequest]" = field(default_factory=set)
    """Its waits for a plan; several when its samples are served separately."""
    reading: asyncio.Timeout | None = None
    lane: str = ""
    """Lane of the line in which it has stood; empty before that."""
    is_closed: bool = False

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Run the block, which prepares the request for the line, until the ticket is displaced.

        Raises Overloaded out of the block when another request takes its place.
        """
        try:
            async with asyncio.timeout(None) as self.reading:
                yield
        except TimeoutError:
            if self.displaced is None:
                raise
        finally:
            self.reading = None
        self.check_place()

    def check_place(self) -> None:
        """Raise Overloaded when another request has taken its place."""
        if self.displaced is not None:
            raise self.displaced.error()

    def displace(self, refused: Refused) -> None:
        """Give its place away and end all its waits."""
        self.displaced = refused
        if self.reading is not None:
            self.reading.reschedule(asyncio.get_running_loop().time())
        for queued in self.queued:
            if not queued.is_settled:
                queued.settle(refused)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_error: object) -> None:
        self.on_close(self)


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest:
    """A request, or a sample of one, that waits for a plan, over all the refusals that it meets."""

    ticket: Ticket
    search: Search
    deadline_s: float
    """Time on the router's clock at which it gives up."""
    is_set_back: bool = False
    """Whether it has given its room to another tenant's request, so that it stands in its own tenant's order."""
    claims_again_s: float = 0.0
    """Time from which it may look again for room that other tenants have beyond their share."""
    goes_first: bool | None = None
    """Whether it goes before all newcomers, because its request has lost a worker; None before it is in line."""
    on_waiting: "Callable[[DurationForecast | None], None]" = lambda _forecast: None
    """Called when a newcomer begins to wait, with the forecast of its first token; None while there is no worker."""
    on_late: Callable[[], None] | None = None
    """Adapts the search of a request that is late, or would be refused for its objective; None: nothing to adapt."""
    granted: "asyncio.Future[Booking | Refused | EngineFault] | None" = None
    last_refusal: Refused | None = None
    refused_at: int = -1
    """Number of the fleet's changes at the last refusal; asking again helps only after another change."""
    refused_at_opening: int = -1
    """Number of times that a worker had become free after none was, at the last refusal."""
    ask_again_s: float = 0.0
    """Time at which the last refusal suggests asking again."""
    waits_before: Waits = NO_WAITS
    """Waits of requests like it (`Asker.waits`) at its arrival in line."""
    num_overtaken: int = 0
    """Plans given to requests behind this one after it was refused one."""

    @property
    def is_settled(self) -> bool:
        """Whether its wait has ended, or is about to because its task is cancelled."""
        assert self.granted is not None, f"{self.search.request.request_id} is in line without a future"
        return self.granted.done()

    def settle(self, outcome: Booking | Refused | EngineFault) -> None:
        """End its wait."""
        assert self.granted is not None, "only a request in line is granted a plan"
        self.granted.set_result(outcome)

    @property
    def is_newcomer(self) -> bool:
        """Whether it stands in a lane that a limit of its tenant may hold; known once it is in line."""
        return not (self.goes_first or self.is_set_back)

    @property
    def lacks_room(self) -> bool:
        """Whether its last refusal was for want of room on a worker that answers."""
        last = self.last_refusal
        return last is not None and (self.search.needs_room or last.cause is RefusalCause.SATURATED)

    @property
    def is_busy(self) -> bool:
        """Whether it prefers to wait for a worker that is busy with other prompts."""
        return self.last_refusal is not None and self.last_refusal.cause is RefusalCause.BUSY

    def become_late(self) -> None:
        """Adapt the search once, before the request is tried as a late one."""
        if self.on_late is not None:
            self.on_late()
            self.on_late = self.last_refusal = None

"""A request's ticket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.errors import EngineFault, Refused
from router.fleet.booking import Booking
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
    granted: "set[asyncio.Future[Booking | Refused | EngineFault]]" = field(default_factory=set)
    """Results of its waits for a plan; several when its samples are served separately."""
    reading: asyncio.Timeout | None = None
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
        for granted in self.granted:
            if not granted.done():
                granted.set_result(refused)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_error: object) -> None:
        self.on_close(self)

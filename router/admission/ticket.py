"""A request's ticket, and its standing in line."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType

from common.errors import Overloaded, Refused
from router.admission.account import Account, Service
from router.admission.terms import Terms
from router.placement.chooser import Search
from router.placement.decisions import Booking


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """The right of one request to be served, kept until it ends. Leaving its `with` block gives it up."""

    number: int
    """In order of arrival."""
    account: Account
    terms: Terms
    received_s: float
    on_close: "Callable[[Ticket], None]"
    expected: Service = field(default_factory=Service)
    """What its tenant's token rate was charged."""
    service: Service = field(default_factory=Service)
    """What its tenant's share was charged."""
    has_plan: bool = False
    """It has had one; from then on no limit refuses it, and it stands before newcomers."""
    displaced: Refused | None = None
    """Set: its place was given to another tenant's request before it had a plan, and this is what it is told."""
    queued: "set[QueuedRequest]" = field(default_factory=set)
    """Of its samples, those that stand in line."""
    reading: asyncio.Timeout | None = None
    is_closed: bool = False

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Run the block, what a request does before it stands in line, as long as its place is its own.

        Raises Overloaded out of the block when that is given to another.
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
        """Raise Overloaded when its place was given to another."""
        if self.displaced is not None:
            raise Overloaded(self.displaced.reason, retry_after_s=self.displaced.retry_after_s)

    def displace(self, refused: Refused) -> None:
        """Give its place away and end whatever it waits for."""
        self.displaced = refused
        if self.reading is not None:
            self.reading.reschedule(asyncio.get_running_loop().time())
        for queued in self.queued:
            assert queued.granted is not None, "who stands in line has a future"
            if not queued.granted.done():
                queued.granted.set_result(refused)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_close(self)


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest:
    """Somebody who looks for a plan, over all the refusals that it meets."""

    ticket: Ticket
    search: Search
    deadline_s: float
    """Time of the event loop after which it gives up."""
    granted: "asyncio.Future[Booking | Refused] | None" = None
    last_refusal: Refused | None = None
    refused_at: int = -1
    """State of the fleet at the last refusal: nothing new is to be expected before it changes."""
    ask_again_s: float = 0.0
    """When the last refusal suggested to ask again."""
    num_overtaken: int = 0
    """Plans given to others after this one had been refused one before them."""

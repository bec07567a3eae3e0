"""A request's ticket, and its standing in line."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from common.errors import Refused
from router.admission.account import Account, Service
from router.admission.terms import Terms
from router.booking import Booking
from router.placement.search import Search


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
    is_closed: bool = False

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_close(self)


@dataclass(slots=True, eq=False, kw_only=True)
class Seeker:
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

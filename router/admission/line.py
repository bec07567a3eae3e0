"""Who gets a plan, and when: one bounded line, first come first served.

A request takes a *ticket* when it arrives; the tickets without a plan are bounded, and a full line refuses. Requests
wait in ticket order for a plan, so one that lost its worker stands before those that came later. The line is served
from its head whenever the fleet changes: there is no polling. A worker that refuses a request is not asked again for
it until its load has changed since, or the time that it named has passed.
"""

import asyncio
import bisect
from dataclasses import dataclass
from types import TracebackType

from common.clock import Clock
from common.errors import Overloaded, Refused, WorkerLost
from router.booking import Booking
from router.fleet import Fleet
from router.placement.chooser import Chooser
from router.placement.search import Search

RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """A request's place in line, kept until it ends. Leaving its `with` block gives it up."""

    number: int
    admission: "Admission"

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.admission.close(self)


@dataclass(slots=True, eq=False, kw_only=True)
class Seeker:
    """Somebody in line."""

    ticket: Ticket
    search: Search
    deadline_s: float
    """Time of the event loop after which it gives up."""
    granted: "asyncio.Future[Booking] | None" = None
    last_refusal: Refused | None = None

    @property
    def number(self) -> int:
        """Place in line."""
        return self.ticket.number


class Admission:
    """The line. Event loop only."""

    def __init__(self, *, fleet: Fleet, chooser: Chooser, clock: Clock, max_queued: int) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self._clock = clock
        self._max_queued = max_queued
        self._next_number = 0
        self._unplanned: set[Ticket] = set()
        self._planned: set[Ticket] = set()
        self._line: list[Seeker] = []
        self._timer: asyncio.TimerHandle | None = None
        fleet.subscribe(self._serve)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a plan, those that lost theirs included."""
        return len(self._unplanned) + sum(seeker.ticket in self._planned for seeker in self._line)

    @property
    def num_active(self) -> int:
        """Requests that have had a plan and have not ended."""
        return len(self._planned)

    def admit(self) -> Ticket | Refused:
        """Return a place in line, or a refusal when the line is full."""
        if len(self._unplanned) >= self._max_queued:
            reason = f"{len(self._unplanned)} requests are waiting; the limit is {self._max_queued}"
            return Refused(reason=reason, retry_after_s=RETRY_AFTER_S)
        ticket = Ticket(number=self._next_number, admission=self)
        self._next_number += 1
        self._unplanned.add(ticket)
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Give up a ticket; called by the ticket itself."""
        self._unplanned.discard(ticket)
        self._planned.discard(ticket)

    async def place(self, seeker: Seeker) -> Booking:
        """Wait in line for a plan; returns it booked. The caller releases the booking.

        Raises Overloaded, or WorkerLost when a pool is empty, after the seeker's deadline.
        """
        granted: asyncio.Future[Booking] = asyncio.get_running_loop().create_future()
        seeker.granted = granted
        bisect.insort(self._line, seeker, key=lambda other: other.number)
        try:
            self._serve()
            async with asyncio.timeout_at(seeker.deadline_s):
                return await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                granted.result().release()
            if isinstance(error, TimeoutError):
                raise self._timeout_error(seeker) from None
            raise
        finally:
            if seeker in self._line:
                self._line.remove(seeker)
                self._serve()

    def _serve(self) -> None:
        """Give plans to the head of the line until there is none for it."""
        while self._line:
            seeker = self._line[0]
            assert seeker.granted is not None, f"{seeker.search.sought.request_id} is in line without a future"
            if seeker.granted.done():  # cancelled: its task is about to leave the line
                del self._line[0]
                continue
            booking = self._chooser.choose(seeker.search)
            if isinstance(booking, Refused):
                seeker.last_refusal = booking
                self._wake_for(seeker)
                return
            del self._line[0]
            self._unplanned.discard(seeker.ticket)
            self._planned.add(seeker.ticket)
            seeker.granted.set_result(booking)

    def _wake_for(self, seeker: Seeker) -> None:
        """Serve the line again when the first of the seeker's exclusions ends, even if nothing changes until then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wakes_at_s = seeker.search.wakes_at_s
        if wakes_at_s is not None:
            delay_s = max(wakes_at_s - self._clock.monotonic(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._serve)

    def _timeout_error(self, seeker: Seeker) -> Overloaded | WorkerLost:
        reason = seeker.last_refusal.reason if seeker.last_refusal is not None else "others are first in line"
        message = f"no plan in time: {reason}"
        if not self._fleet.has_ready_decode:
            return WorkerLost(message)
        return Overloaded(message, retry_after_s=RETRY_AFTER_S)

"""Who gets a plan, and when: one bounded line, first come first served.

A request takes a *ticket* when it arrives; the tickets without a plan are bounded, and a full line refuses. Requests
wait in ticket order for a plan, so one that lost its worker stands before those that came later. The line is served
from its head whenever the fleet changes: there is no polling. A worker that refuses a request is not asked again for
it until its load has changed since, or the time that it named has passed.
"""

import asyncio
import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from common.clock import Clock
from common.errors import Overloaded, Refused, WorkerLost
from common.ids import BlockHash, RequestId, WorkerId
from router.booking import Booking
from router.fleet import Fleet
from router.index import PrefixIndex
from router.placement.plans import Plan, RouteRequest
from router.placement.policies import Policy

EXPECTED_TTL_S = 30.0
"""How long blocks that a plan will produce count as cached without a word from the worker."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """What a request needs a plan for."""

    request_id: RequestId
    num_tokens: int
    """Known tokens: prompt and output so far."""
    num_samples: int
    block_size: int
    hashes: tuple[BlockHash, ...]
    """Of the full blocks of the known tokens; empty when cached KV cannot be used."""

    @property
    def num_decode_blocks(self) -> int:
        """Pages to ask for: the full blocks are shared by the samples, the rest and the next token are not."""
        full = self.num_tokens // self.block_size
        return full + self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exclusion:
    load_version: int
    until_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class Seeker:
    """One search for a plan, over all the refusals that it meets."""

    ticket: Ticket
    sought: Sought
    deadline_s: float
    """Time of the event loop after which it gives up."""
    exclusions: dict[WorkerId, _Exclusion] = field(default_factory=dict)
    version_when_booked: dict[WorkerId, int] = field(default_factory=dict)
    granted: "asyncio.Future[Booking] | None" = None
    last_refusal: Refused | None = None

    @property
    def number(self) -> int:
        """Place in line."""
        return self.ticket.number


class Admission:
    """The line. Event loop only."""

    def __init__(self, *, fleet: Fleet, index: PrefixIndex, policy: Policy, clock: Clock, max_queued: int) -> None:
        self._fleet = fleet
        self._index = index
        self._policy = policy
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

    def expect(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Count blocks as cached on a worker ahead of its own word: the next request must not race its events."""
        self._index.expect(worker_id, hashes, expires_s=self._clock.monotonic() + EXPECTED_TTL_S)

    def exclude(self, seeker: Seeker, worker_id: WorkerId, *, retry_after_s: float | None) -> None:
        """Do not offer a worker that refused the seeker before its load changed or the time has passed."""
        seeker.exclusions[worker_id] = _Exclusion(
            # As of the choice: a change between choice and refusal is a reason to ask again at once.
            load_version=seeker.version_when_booked.get(worker_id, 0),
            until_s=self._clock.monotonic() + (RETRY_AFTER_S if retry_after_s is None else retry_after_s),
        )

    def _serve(self) -> None:
        """Give plans to the head of the line until there is none for it."""
        while self._line:
            seeker = self._line[0]
            assert seeker.granted is not None, f"{seeker.sought.request_id} is in line without a future"
            if seeker.granted.done():  # cancelled: its task is about to leave the line
                del self._line[0]
                continue
            booking = self._choose(seeker)
            if isinstance(booking, Refused):
                seeker.last_refusal = booking
                self._wake_for(seeker)
                return
            del self._line[0]
            self._unplanned.discard(seeker.ticket)
            self._planned.add(seeker.ticket)
            seeker.granted.set_result(booking)

    def _choose(self, seeker: Seeker) -> Booking | Refused:
        """Choose and book in one step."""
        now_s = self._clock.monotonic()
        self._index.expire(now_s)
        sought = seeker.sought
        seeker.exclusions = {
            worker_id: exclusion
            for worker_id, exclusion in seeker.exclusions.items()
            if exclusion.until_s > now_s and exclusion.load_version == self._fleet.load_version(worker_id)
        }
        view = self._fleet.view(excluded=seeker.exclusions.keys())
        matches = self._index.match(sought.hashes)
        request = RouteRequest(
            request_id=sought.request_id,
            num_tokens=sought.num_tokens,
            block_size=sought.block_size,
            num_samples=sought.num_samples,
            num_decode_blocks=sought.num_decode_blocks,
            cached_blocks=matches,
        )
        plan = self._policy.choose(request, view)
        while isinstance(plan, Plan) and self._correct(matches, plan, sought.hashes):
            plan = self._policy.choose(request, view)
        if isinstance(plan, Refused):
            return plan
        booking = self._fleet.book(plan, request)
        for worker_id in (plan.decode, plan.prefill):
            if worker_id is not None:
                seeker.version_when_booked[worker_id] = self._fleet.load_version(worker_id)
        # Only where they are computed: a sibling may queue behind them there, but until the blocks have
        # really arrived at the decode worker of a remote plan, a local plan there would compute them again.
        self.expect(plan.decode if plan.prefill is None else plan.prefill, sought.hashes)
        return booking

    def _correct(self, matches: dict[WorkerId, int], plan: Plan, hashes: Sequence[BlockHash]) -> bool:
        """Replace the chosen workers' matches by exact ones; returns whether that changed any."""
        changed = False
        for worker_id in (plan.decode, plan.prefill):
            if worker_id is not None and worker_id in matches:
                exact = self._index.count_leading(worker_id, hashes, at_most=matches[worker_id])
                changed |= exact != matches[worker_id]
                matches[worker_id] = exact
        return changed

    def _wake_for(self, seeker: Seeker) -> None:
        """Serve the line again when the first of the seeker's exclusions ends, even if nothing changes until then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seeker.exclusions:
            first_s = min(exclusion.until_s for exclusion in seeker.exclusions.values())
            delay_s = max(first_s - self._clock.monotonic(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._serve)

    def _timeout_error(self, seeker: Seeker) -> Overloaded | WorkerLost:
        reason = seeker.last_refusal.reason if seeker.last_refusal is not None else "others are first in line"
        message = f"no plan in time: {reason}"
        if not self._fleet.has_ready_decode:
            return WorkerLost(message)
        return Overloaded(message, retry_after_s=RETRY_AFTER_S)

"""Checks while a walk runs: no work for clients that have gone, no token twice, none by a life that was not meant.

The answers would be right all the same, and everything whole in the end: the work alone is wrong.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from common.ids import Epoch, RequestId, WorkerId
from engine.core import EngineCore
from engine.events import Tokens
from engine.steps.group import Group
from measure.simulate.chaos.oracles import AnswerCheck
from measure.simulate.chaos.settings import ChaosReport
from router.fleet.booking import Booking
from router.fleet.decisions import CAPACITY
from router.parts import RouterParts
from router.placement.plans import PlacementRequest, Plan
from router.record.ticket import Ticket
from router.tenants import ANYBODY as HOUSE

GONE_S = 0.1
"""Time in which a healthy worker hears, over a healthy network, that the client of a request has gone."""


class Audit:
    """Requests whose clients are there, and what is done for them. Event loop only."""

    def __init__(self, report: ChaosReport) -> None:
        self.report = report
        """Broken invariants go into it."""
        self._checks: dict[RequestId, tuple[AnswerCheck, RouterParts | None]] = {}
        """Requests whose clients are there, with the router that knows all of their tokens."""
        self._tickets: dict[int, set[Ticket]] = {}
        self._begun: set[tuple[Group, int]] = set()
        self._booked: set[tuple[RequestId, WorkerId, Epoch]] = set()
        """Lives of workers that routers have booked for requests."""

    def watch_bookings(self, router: RouterParts) -> None:
        """Note the lives that a router books from now on."""
        book = router.fleet.bookings.book

        def noting(plan: Plan, request: PlacementRequest) -> Booking:
            booking = book(plan, request)
            holds = (booking.answering, booking.prefill)
            lives = [(hold.member.endpoint.worker_id, hold.epoch) for hold in holds if hold is not None]
            self._booked.update((request.request_id, worker_id, epoch) for worker_id, epoch in lives)
            return booking

        router.fleet.bookings.book = noting  # type: ignore[method-assign]

    @contextmanager
    def following(
        self, router: RouterParts, request_id: RequestId, check: AnswerCheck, ticket: Ticket, *, is_direct: bool
    ) -> Iterator[None]:
        """Follow a request of a router in the block, which its client leaves when it ends.

        `is_direct`: the client gets tokens that the router does not know of, and that may be generated again.
        """
        tickets = self._tickets.setdefault(id(router), set())
        self._checks[request_id] = check, None if is_direct else router
        tickets.add(ticket)
        try:
            yield
        finally:
            del self._checks[request_id]
            tickets.remove(ticket)
            num_places = sum(len(other.granted) for other in tickets)
            if router.line.num_in_line > num_places:
                self.report.violations.append(f"{request_id} has gone, and has left a place in line")

    def take(self, worker_id: WorkerId, epoch: Epoch, group: Group, event: Tokens) -> None:
        """Check where the tokens of a request begin: in a life that was booked for it, behind what its client has."""
        request_id = group.request.request_id
        first = [(output.sample_index, output.token_index) for output in event.tokens]
        first += [(run.sample_index, run.first_token_index) for run in event.runs]
        for sample_index, token_index in first:
            if (group, sample_index) in self._begun:
                continue
            self._begun.add((group, sample_index))
            if (request_id, worker_id, epoch) not in self._booked:
                self.report.violations.append(
                    f"{request_id} is computed by a life of {worker_id} that it was not sent to"
                )
            if request_id not in self._checks:
                continue
            check, router = self._checks[request_id]
            num_known = check.num_tokens_of(sample_index)
            if router is not None and token_index < num_known and _runs_on(worker_id, router, request_id):
                what = f"sample {sample_index} begins again at token {token_index}; its client has {num_known}"
                self.report.violations.append(f"{request_id}: {what}")

    def work_for_nobody(self, core: EngineCore, *, with_held: bool) -> Counter[RequestId]:
        """Return the sequences that an engine has for requests whose clients have gone.

        `with_held`: those that it has computed for other workers, too, which leave when these are well.
        """
        scheduler = core.scheduler
        sequences = (*scheduler.waiting, *scheduler.running, *scheduler.reserved)
        if with_held:
            sequences += (*scheduler.held,)
        ids = (sequence.request.request_id for sequence in sequences)
        return Counter(request_id for request_id in ids if request_id not in self._checks)


def _runs_on(worker_id: WorkerId, router: RouterParts, request_id: RequestId) -> bool:
    """Return whether a router has a request on a worker; if not, the call came late, and so does its cancellation."""
    attempts = router.chooser.decisions.latest(tenant=HOUSE.name, limit=CAPACITY, request_id=request_id)
    return any(
        not attempt.ended and worker_id in (attempt.plan.answering, attempt.plan.prefill) for attempt in attempts
    )

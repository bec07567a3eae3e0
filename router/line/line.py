"""The line: one for each pool that answers (pool_line.py), so that no request waits behind one of another pool."""

from collections.abc import Mapping

from common.clock import Clock
from router.choosing.chooser import Chooser
from router.fleet.booking import Booking
from router.fleet.fleet import Fleet
from router.line.admission import Admission
from router.line.fair_queue import FairQueue
from router.line.pool_line import PoolLine
from router.line.read_ahead import LineReadAhead
from router.line.wait import Wait
from router.placement.answer_pool import AnswerPool
from router.placement.waits import WaitingRequest


class Line:
    """Requests that wait for a plan. Event loop only."""

    def __init__(
        self,
        *,
        admission: Admission,
        queues: Mapping[AnswerPool, FairQueue[Wait]],
        chooser: Chooser,
        fleet: Fleet,
        ahead: LineReadAhead,
        clock: Clock,
    ) -> None:
        """`queues` are those that `admission` charges."""
        self.admission = admission
        self._queues = queues
        self._lines = {
            pool: PoolLine(pool, admission=admission, queue=queue, chooser=chooser, fleet=fleet, clock=clock)
            for pool, queue in queues.items()
        }
        self._ahead = ahead
        for line in self._lines.values():
            line.on_waiting = ahead.enter
        fleet.subscribe(self._on_change)
        admission.on_room = self._serve

    @property
    def num_queued(self) -> int:
        """Requests that wait for a plan, those that lost theirs included."""
        return self.admission.num_without_plan + sum(line.num_again for line in self._lines.values())

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of the queued requests whose size is known."""
        return sum(line.num_queued_tokens for line in self._lines.values())

    @property
    def num_in_line(self) -> int:
        """Places in the line; a request whose samples are served separately has several."""
        return sum(map(len, self._queues.values()))

    def waiting(self) -> list[WaitingRequest]:
        """Return the requests that wait now."""
        return [request for line in self._lines.values() for request in line.waiting()]

    async def place(self, wait: Wait) -> Booking:
        """Wait in line for a plan and return it booked; see `PoolLine.place`.

        Meanwhile a worker may read the request's blocks from its tiers into pages.
        """
        booking: Booking | None = None
        try:
            booking = await self._lines[wait.request.pool].place(wait)
        finally:
            self._ahead.leave(wait, booking)
        return booking

    def _on_change(self) -> None:
        for line in self._in_turn():
            line.on_change()

    def _serve(self) -> None:
        for line in self._in_turn():
            line.serve()

    def _in_turn(self) -> list[PoolLine]:
        """Return the line first that has not had a plan for longer: both need prefill workers."""
        return sorted(self._lines.values(), key=lambda line: line.granted_s)

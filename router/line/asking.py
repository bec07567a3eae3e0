"""When it is worth asking the chooser about a waiting request again.

A worker that refuses a request is offered it again only when its load has changed or the time that it named has passed
(chooser.py). A request that prefers to wait for a busy worker is asked again when that worker's load changes, when it
should be free, or when a worker becomes free after none was. A request that needs room is asked again when some worker
may have it, and now and then in case it has become too late for it. Any other is asked again after any change.
"""

import logging
from collections.abc import Mapping

from common.clock import Clock
from common.errors import EngineFault, RefusalCause, Refused
from router.choosing.chooser import Chooser
from router.fleet.decisions import Booking
from router.placement.answer_pool import AnswerPool
from router.placement.waits import PoolWaits, Waits
from router.record.ticket import QueuedRequest

logger = logging.getLogger(__name__)

MIN_BUSY_S = 0.005
"""Shortest pause before a request that waits for one busy worker is tried again."""
JUDGE_AGAIN_S = 0.1
"""Pause before a request is asked about again for which there is still no room: it may be too late for it by now."""


class Asker:
    """Asks the chooser, and knows when the answer would be the last refusal again. Event loop only."""

    def __init__(self, chooser: Chooser, waits: Mapping[AnswerPool, PoolWaits], clock: Clock) -> None:
        """`waits`: by the pool that answers."""
        self._chooser = chooser
        self._waits = waits
        self._clock = clock
        self.num_changes = 0
        """Changes of the fleet so far."""
        self._opens_s = 0.0
        """Time at which the first worker is free for another prompt, as of the last look."""
        self._num_openings = 0
        """Times that a worker became free after none was."""
        self.is_open = False
        """Whether some worker was free for another prompt at the last look."""

    def look(self, now_s: float) -> None:
        """Note whether some worker is free for another prompt."""
        self._opens_s = self._chooser.opens_at_s()
        was_open, self.is_open = self.is_open, self._opens_s <= now_s
        self._num_openings += self.is_open and not was_open

    def waits(self, queued: QueuedRequest) -> Waits:
        """Return how long requests like this one have ever waited for what."""
        tenant = queued.ticket.account.tenant.name if queued.is_newcomer else None
        return self._waits[queued.search.request.pool].read(tenant)

    def ask(self, queued: QueuedRequest) -> Booking | Refused | None:
        """Return a booked plan, or why there is none now; None when the policy has failed, and the request with it."""
        try:
            outcome = self._chooser.choose(queued.search)
        except Exception as error:
            logger.exception("cannot choose", extra={"request_id": queued.search.request.request_id})
            queued.settle(EngineFault(f"cannot choose workers: {type(error).__name__}: {error}"))
            return None
        if isinstance(outcome, Booking):
            outcome.decision.waits = self.waits(queued) - queued.waits_before
        else:
            if not outcome.is_final:  # else it concerns this request alone
                self._waits[queued.search.request.pool].note(outcome)
            queued.last_refusal = outcome
            queued.refused_at, queued.refused_at_opening = self.num_changes, self._num_openings
            pause_s = JUDGE_AGAIN_S if queued.search.needs_room else max(outcome.retry_after_s, MIN_BUSY_S)
            queued.ask_again_s = self._clock.monotonic() + pause_s
        return outcome

    def known_refusal(self, queued: QueuedRequest) -> Refused | None:
        """Return the last refusal of a request while asking again cannot help; else None."""
        last = queued.last_refusal
        return None if last is None or self._is_worth_asking(queued, last) else last

    def _is_worth_asking(self, queued: QueuedRequest, last: Refused) -> bool:
        now_s, search = self._clock.monotonic(), queued.search
        if queued.is_busy:
            if self._opens_s > now_s:
                return False
            if queued.refused_at_opening == self._num_openings and not self._chooser.may_differ(search):
                return self.wakes_at_s(queued) <= now_s
        # A saturated pool is closed to all that wait for it, so it is asked about again: others may fit by now.
        awaits_room = search.needs_room and last.cause is not RefusalCause.SATURATED
        if awaits_room and not self._chooser.may_hold(search.request):
            return queued.ask_again_s <= now_s
        return queued.refused_at != self.num_changes or self.wakes_at_s(queued) <= now_s

    def wakes_at_s(self, queued: QueuedRequest) -> float:
        """Return the time at which asking again can help although nothing has changed."""
        wakes_at_s = queued.search.wakes_at_s
        if not queued.is_busy:
            return wakes_at_s
        # When a worker becomes free; or, if one is free and this request prefers another, when the other one is.
        return min(wakes_at_s, self._opens_s if self._opens_s > self._clock.monotonic() else queued.ask_again_s)

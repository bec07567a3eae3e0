"""When it is worth asking the chooser about a waiting request again.

A worker that refuses a request is offered it again only when its load has changed or the time that it named has passed
(chooser.py). A request that prefers to wait for a busy worker is asked again when that worker's load changes, when it
should be free, or when a worker becomes free after none was. A request that needs room is asked again when some worker
may have it, and now and then in case it has become too late for it. Any other is asked again after any change.
"""

import logging
import math

from common.clock import Clock
from common.errors import EngineFault, Refused
from router.choosing.chooser import Chooser
from router.fleet.booking import Booking
from router.line.wait import Retry, Standing, Wait
from router.placement.plans import NoRoom
from router.placement.waits import PoolWaits, Waits

logger = logging.getLogger(__name__)

MIN_BUSY_S = 0.005
"""Shortest pause before a request that waits for one busy worker is tried again."""
JUDGE_AGAIN_S = 0.1
"""Pause before a request is asked about again for which there is still no room: it may be too late for it by now."""


class PlanFinder:
    """Asks the chooser, and knows when the answer would be the last refusal again. Event loop only."""

    def __init__(self, chooser: Chooser, waits: PoolWaits, clock: Clock) -> None:
        """`waits`: those of the pool that answers."""
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

    def waits(self, wait: Wait) -> Waits:
        """Return how long requests like this one have ever waited for what."""
        tenant = wait.tenant if wait.standing is Standing.NEWCOMER else None
        return self._waits.read(tenant)

    def ask(self, wait: Wait) -> Booking | Retry | None:
        """Return a booked plan, or why there is none now; None when the policy has failed, and the request with it."""
        try:
            outcome = self._chooser.choose(wait)
        except Exception as error:
            logger.exception("cannot choose", extra={"request_id": wait.request.request_id})
            wait.settle(EngineFault(f"cannot choose workers: {type(error).__name__}: {error}"))
            return None
        if isinstance(outcome, Booking):
            outcome.decision.waits = self.waits(wait) - wait.waits_before
            return outcome
        if not outcome.is_final:  # else it concerns this request alone
            self._waits.note(outcome)
        wait.retry = self._retry(wait, outcome)
        return wait.retry

    def _retry(self, wait: Wait, refused: Refused) -> Retry:
        pause_s = JUDGE_AGAIN_S if isinstance(refused, NoRoom) else max(refused.retry_after_s, MIN_BUSY_S)
        return Retry(
            refused=refused,
            num_changes=self.num_changes,
            num_openings=self._num_openings,
            at_s=self._clock.monotonic() + pause_s,
            exclusions_end_s=min((each.until_s for each in wait.exclusions.values()), default=math.inf),
        )

    def known_refusal(self, wait: Wait) -> Retry | None:
        """Return the last refusal of a request while asking again cannot help; else None."""
        retry = wait.retry
        return None if retry is None or self._is_due(wait, retry) else retry

    def _is_due(self, wait: Wait, retry: Retry) -> bool:
        now_s, awaited = self._clock.monotonic(), retry.awaited
        if awaited is not None:
            if self._opens_s > now_s:
                return False
            # What others were given makes a busy worker no better, and one that becomes free is an opening.
            is_same = retry.exclusions_end_s == math.inf and not self._chooser.has_changed(awaited)
            if is_same and retry.num_openings == self._num_openings:
                return self.wakes_at_s(retry) <= now_s
        if retry.awaits_room and not self._chooser.may_hold(wait.request):
            return retry.at_s <= now_s
        return retry.num_changes != self.num_changes or self.wakes_at_s(retry) <= now_s

    def wakes_at_s(self, retry: Retry) -> float:
        """Return the time at which asking again can help although nothing has changed."""
        if not retry.is_busy:
            return retry.exclusions_end_s
        # When a worker becomes free; or, if one is free and this request prefers another, when the other one is.
        opens_s = self._opens_s if self._opens_s > self._clock.monotonic() else retry.at_s
        return min(retry.exclusions_end_s, opens_s)

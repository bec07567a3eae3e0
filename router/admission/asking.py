"""When it is worth asking the chooser about a waiting request again.

A worker that refuses a request is offered it again only when its load has changed or the time that it named has passed
(chooser.py). A request that prefers to wait for a busy worker is asked again when that worker's load changes, when it
should be free, or when a worker becomes free after none was. A request that needs room is asked again when some worker
may have it, and now and then in case it has become too late for it. Any other, such as one that would break the gaps of
running answers, is asked again after changes; but those that wait take turns, because workers report many times a
second and few reports change the answer.
"""

from common.clock import Clock
from common.errors import Refused
from router.admission.ticket import QueuedRequest
from router.placement.chooser import Chooser
from router.placement.decisions import Booking

MIN_BUSY_S = 0.005
"""Shortest pause before a request that waits for one busy worker is tried again."""
SEARCH_AGAIN_S = 0.1
"""Pause after which waiting requests are tried again though nothing that concerns them has changed: some may be too
late by now, for their deadline or for their place."""
TURN_S = 0.002
"""Pause before a request is asked again after a change that may not concern it, for each request that waits."""


class Asker:
    """Asks the chooser, unless the answer would be the last refusal again. Event loop only."""

    def __init__(self, chooser: Chooser, clock: Clock) -> None:
        self._chooser = chooser
        self._clock = clock
        self.num_changes = 0
        """Changes of the fleet so far."""
        self.num_turns = 1
        """Requests that take turns: those that were refused in the last search."""
        self.opens_s = 0.0
        """Time at which the first worker is free for another prompt, as of the last look."""
        self._num_openings = 0
        """Times that a worker became free after none was."""
        self._is_open = False

    def look(self, now_s: float) -> None:
        """Note whether some worker is free for another prompt."""
        self.opens_s = self._chooser.opens_at_s()
        was_open, self._is_open = self._is_open, self.opens_s <= now_s
        self._num_openings += self._is_open and not was_open

    def ask(self, queued: QueuedRequest) -> Booking | Refused:
        """Return a booked plan, or why there is none now."""
        if queued.last_refusal is not None and not self.is_worth_asking(queued):
            return queued.last_refusal
        outcome = self._chooser.choose(queued.search)
        if isinstance(outcome, Refused):
            queued.last_refusal = outcome
            queued.refused_at, queued.refused_at_opening = self.num_changes, self._num_openings
            queued.ask_again_s = self._clock.monotonic() + self._pause_s(queued, outcome)
        return outcome

    def _pause_s(self, queued: QueuedRequest, refused: Refused) -> float:
        if queued.is_busy:
            return max(refused.retry_after_s, MIN_BUSY_S)
        return SEARCH_AGAIN_S if queued.search.needs_room else TURN_S * self.num_turns

    def is_worth_asking(self, queued: QueuedRequest) -> bool:
        """Return whether a request that was refused may get a plan now, or a final refusal."""
        now_s = self._clock.monotonic()
        if queued.is_busy and self.opens_s > now_s:
            return False
        has_opened = queued.is_busy and queued.refused_at_opening != self._num_openings
        if not has_opened and not self._chooser.may_differ(queued.search):
            return queued.ask_again_s <= now_s
        return (self._has_changed(queued) and not self._awaits_turn(queued)) or self.wakes_at_s(queued) <= now_s

    def _has_changed(self, queued: QueuedRequest) -> bool:
        return queued.refused_at != self.num_changes

    def _awaits_turn(self, queued: QueuedRequest) -> bool:
        search = queued.search
        return not (queued.is_busy or search.needs_room or search.exclusions)

    def wakes_at_s(self, queued: QueuedRequest) -> float:
        """Return the time at which asking again can help although nothing has changed."""
        wakes_at_s = queued.search.wakes_at_s
        if not queued.is_busy:
            has_turn = self._awaits_turn(queued) and self._has_changed(queued)
            return queued.ask_again_s if has_turn else wakes_at_s
        # When a worker becomes free; or, if one is free and this request prefers another, when the other one is.
        return min(wakes_at_s, self.opens_s if self.opens_s > self._clock.monotonic() else queued.ask_again_s)

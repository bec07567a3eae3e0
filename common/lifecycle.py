"""The life cycle of a request at the router: one enum, one table, one mutator.

    QUEUED ──▶ RESERVING ──▶ PREFILLING ──▶ HANDOFF ──▶ DECODING ──▶ FINISHED
      ▲            │             │   └─────(local plan)────▲ │
      └────────────┴─────────────┴─────────────────────────┴─┘   a worker refused or was lost: plan again

Every live state may also end in FAILED or CANCELLED. Terminal states absorb: a late end is a logged no-op. Every
transition is stamped, and every duration that kvrelay reports is a difference of stamps.
"""

import enum
import logging
import math

from common.clock import Clock
from common.ids import RequestId

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """Stage of a request."""

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})
_ENDS = TERMINAL - {State.FINISHED}
_NEXT: dict[State, frozenset[State]] = {
    # FINISHED: a resumed answer may already hold all its tokens.
    State.QUEUED: frozenset({State.RESERVING, State.FINISHED}) | _ENDS,
    State.RESERVING: frozenset({State.PREFILLING, State.QUEUED}) | _ENDS,
    # FINISHED: the first token was the last one. DECODING: a local plan has no handoff.
    State.PREFILLING: frozenset({State.HANDOFF, State.DECODING, State.FINISHED, State.QUEUED}) | _ENDS,
    State.HANDOFF: frozenset({State.DECODING, State.FINISHED, State.QUEUED}) | _ENDS,
    State.DECODING: frozenset({State.FINISHED, State.QUEUED}) | _ENDS,
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


class IllegalTransition(Exception):
    """Our own code attempted a transition that the table does not allow."""


class LifeCycle:
    """The state of one request and the stamps of its transitions. Event loop only."""

    def __init__(self, request_id: RequestId, clock: Clock, *, deadline_s: float = math.inf) -> None:
        self.request_id = request_id
        self.deadline_s = deadline_s
        """Time on the clock at which everything must have ended."""
        self._clock = clock
        self._state = State.QUEUED
        self.stamps: list[tuple[State, float]] = [(State.QUEUED, clock.monotonic())]

    @property
    def state(self) -> State:
        """Current state."""
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether the request has ended."""
        return self._state in TERMINAL

    @property
    def received_s(self) -> float:
        """Time of the first stamp."""
        return self.stamps[0][1]

    @property
    def left_s(self) -> float:
        """Time until the deadline."""
        return self.deadline_s - self._clock.monotonic()

    def end_within(self, seconds: float | None) -> None:
        """Bring the deadline forward, if it is later; None: the caller names none."""
        if seconds is not None:
            self.deadline_s = min(self.deadline_s, self._clock.monotonic() + seconds)

    def advance(self, to: State) -> None:
        """Enter `to` and stamp it. The only writer. Raises IllegalTransition; a no-op once terminal."""
        if self.is_over:
            logger.debug("late transition %s -> %s", self._state.value, to.value, extra={"request_id": self.request_id})
            return
        if to not in _NEXT[self._state]:
            raise IllegalTransition(f"{self.request_id}: {self._state.value} -> {to.value}")
        self._state = to
        self.stamps.append((to, self._clock.monotonic()))

    def first(self, state: State) -> float | None:
        """Return when `state` was first entered, or None."""
        return next((at_s for seen, at_s in self.stamps if seen is state), None)

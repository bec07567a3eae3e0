"""Decides which session goes to which generator process, and when. Bookkeeping only: no clock, no processes.

Sessions of open loops are handed out just in time, `AHEAD_S` before they are due, so that an added process takes part
at once; those of a closed loop as its places become free. Each goes to the process with the fewest sessions.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from measure.workload.sessions import Session, Workload

AHEAD_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Hand a session to a process."""

    process: int
    session: Session
    stream: int | None
    """Number of its closed loop; None: it is due at its `start_s`."""


@dataclass(slots=True)
class _Loop:
    """A closed loop."""

    sessions: Iterator[Session]
    num_free: int
    """Places without a session."""


class Dispatcher:
    """Hands out the sessions of a workload, each exactly once."""

    def __init__(self, workload: Workload) -> None:
        self._duration_s = workload.duration_s
        self._num_left = math.inf if workload.max_requests is None else workload.max_requests
        open_loops = [stream.sessions for stream in workload.streams if stream.concurrency is None]
        self._open = heapq.merge(*open_loops, key=lambda session: session.start_s)
        self._loops = {
            number: _Loop(iter(stream.sessions), num_free=stream.concurrency)
            for number, stream in enumerate(workload.streams)
            if stream.concurrency is not None
        }
        self._num_sessions: dict[int, int] = {}
        self._next = self._draw(self._open)

    @property
    def num_sessions(self) -> int:
        """Sessions that were handed over and have not ended."""
        return sum(self._num_sessions.values())

    @property
    def next_s(self) -> float:
        """Next time at which `take` has work; infinity when time alone brings none."""
        return math.inf if self._next is None else self._next.start_s - AHEAD_S

    @property
    def is_done(self) -> bool:
        """Whether `take` has handed over every session, and all have ended."""
        return self._next is None and not self.num_sessions

    def add_process(self, process: int) -> None:
        """Add a process."""
        self._num_sessions[process] = 0

    def take(self, now_s: float) -> list[Play]:
        """Return the sessions that are to be handed over by now, those of open loops in order of their due times."""
        plays = []
        while self._next is not None and self._next.start_s - AHEAD_S <= now_s:
            plays.append(self._hand_over(self._next, None))
            self._next = self._draw(self._open)
        for number, loop in self._loops.items():
            while loop.num_free and now_s <= self._duration_s and (session := self._draw(loop.sessions)):
                plays.append(self._hand_over(session, number))
                loop.num_free -= 1
        return plays

    def session_over(self, process: int, stream: int | None) -> None:
        """Note the end of a session, which frees its place in a closed loop."""
        self._num_sessions[process] -= 1
        if stream is not None:
            self._loops[stream].num_free += 1

    def stop(self) -> None:
        """Hand out nothing more."""
        self._num_left = 0
        self._next = None

    def _draw(self, sessions: Iterator[Session]) -> Session | None:
        """Return the next of the sessions; None when there is none, or none may begin any more."""
        session = next(sessions, None) if self._num_left > 0 else None
        return session if session is not None and session.start_s <= self._duration_s else None

    def _hand_over(self, session: Session, stream: int | None) -> Play:
        process = min(self._num_sessions, key=lambda one: (self._num_sessions[one], one))
        self._num_left -= len(session.turns)
        self._num_sessions[process] += 1
        return Play(process=process, session=session, stream=stream)

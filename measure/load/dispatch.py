"""Decides which session goes to which generator process, and when. Bookkeeping only: no clock, no processes.

Sessions are handed out just in time, `AHEAD_S` before they are due, so that an added process takes part at once. Those
of open loops go, in order of their due times, to the process with the fewest sessions. The places of a closed loop are
divided among the processes; each process holds one more session per place, which begins the moment a place becomes
free. When a process is added, the others give places back as they become free, so that never more sessions run than
the loop has places.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from measure.workload.sessions import Session, Workload

AHEAD_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Hand a session to a process."""

    process: int
    session: Session
    stream: int | None
    """Number of its closed loop; None: it is due at its `start_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlaces:
    """Give a process places of a closed loop, or take some back when `num_places` is negative."""

    process: int
    stream: int
    num_places: int


Step = Play | MovePlaces


@dataclass(slots=True)
class _Loop:
    """A closed loop."""

    sessions: Iterator[Session]
    concurrency: int
    num_spare: int
    """Places without a process."""
    places: dict[int, int] = field(default_factory=dict)
    """Places by process, without those being taken back."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Sessions by process that were handed over and have not begun."""
    is_exhausted: bool = False


class Dispatcher:
    """Hands out the sessions of a workload, each exactly once."""

    def __init__(self, workload: Workload) -> None:
        streams = enumerate(workload.streams)
        self._duration_s = workload.duration_s
        self._num_left = math.inf if workload.max_requests is None else workload.max_requests
        open_loops = [stream.sessions for stream in workload.streams if stream.concurrency is None]
        self._open = heapq.merge(*open_loops, key=lambda session: session.start_s)
        self._next: Session | None = None
        self._loops = {
            number: _Loop(iter(stream.sessions), stream.concurrency, num_spare=stream.concurrency)
            for number, stream in streams
            if stream.concurrency is not None
        }
        self._num_sessions: dict[int, int] = {}
        self._advance()

    @property
    def num_sessions(self) -> int:
        """Sessions that were handed over and have not ended."""
        return sum(self._num_sessions.values())

    @property
    def next_s(self) -> float:
        """Next time at which `take` has work; infinity when time alone brings none."""
        if self._next is not None:
            return self._next.start_s - AHEAD_S
        return math.inf if all(loop.is_exhausted for loop in self._loops.values()) else self._duration_s

    @property
    def is_done(self) -> bool:
        """Whether every session was handed over and has ended."""
        return self._next is None and not self.num_sessions and all(loop.is_exhausted for loop in self._loops.values())

    def add_process(self, process: int) -> list[Step]:
        """Add a process; return the steps that follow for closed loops."""
        self._num_sessions[process] = 0
        steps: list[Step] = []
        for number, loop in self._loops.items():
            loop.places[process] = loop.waiting[process] = 0
            steps += self._level(number, loop)
        return steps

    def take(self, now_s: float) -> list[Step]:
        """Return the sessions of open loops that are to be handed over by now, in order of their due times."""
        steps: list[Step] = []
        while self._next is not None and self._next.start_s - AHEAD_S <= now_s:
            process = min(self._num_sessions, key=lambda one: (self._num_sessions[one], one))
            steps.append(self._hand_over(process, self._next, None))
            self._advance()
        if now_s >= self._duration_s:
            for loop in self._loops.values():
                loop.is_exhausted = True
        return steps

    def session_begun(self, process: int, stream: int) -> list[Step]:
        """Note that a session of a closed loop has begun; return its successors."""
        self._loops[stream].waiting[process] -= 1
        return self._refill(stream, self._loops[stream])

    def session_over(self, process: int) -> None:
        """Note the end of a session."""
        self._num_sessions[process] -= 1

    def place_returned(self, stream: int) -> list[Step]:
        """Note that a place was given back; return the steps that hand it on."""
        loop = self._loops[stream]
        loop.num_spare += 1
        return self._level(stream, loop)

    def stop(self) -> None:
        """Hand out nothing more."""
        self._num_left = 0
        self._next = None
        for loop in self._loops.values():
            loop.is_exhausted = True

    def _advance(self) -> None:
        """Fetch the next session of the open loops."""
        session = next(self._open, None) if self._num_left > 0 else None
        self._next = session if session is not None and session.start_s <= self._duration_s else None

    def _hand_over(self, process: int, session: Session, stream: int | None) -> Play:
        self._num_left -= len(session.turns)
        self._num_sessions[process] += 1
        return Play(process=process, session=session, stream=stream)

    def _level(self, number: int, loop: _Loop) -> list[Step]:
        """Hand spare places to the processes with the fewest, and take some back from those with the most."""
        moves: dict[int, int] = {}
        while loop.num_spare:
            poorest = min(loop.places, key=lambda one: (loop.places[one], one))
            loop.num_spare -= 1
            loop.places[poorest] += 1
            moves[poorest] = moves.get(poorest, 0) + 1
        num_asked = loop.concurrency - sum(loop.places.values())  # on their way back
        while True:
            richest = max(loop.places, key=lambda one: (loop.places[one], one))
            if loop.places[richest] - min(loop.places.values()) - num_asked <= 1:
                break
            loop.places[richest] -= 1
            num_asked += 1
            moves[richest] = moves.get(richest, 0) - 1
        steps: list[Step] = [
            MovePlaces(process=process, stream=number, num_places=num) for process, num in moves.items() if num
        ]
        return steps + self._refill(number, loop)

    def _refill(self, number: int, loop: _Loop) -> list[Step]:
        """Give every process as many waiting sessions as it has places."""
        steps: list[Step] = []
        for process, num_places in loop.places.items():
            while loop.waiting[process] < num_places and not loop.is_exhausted:
                session = next(loop.sessions, None) if self._num_left > 0 else None
                if session is None:
                    loop.is_exhausted = True
                    break
                loop.waiting[process] += 1
                steps.append(self._hand_over(process, session, number))
        return steps

"""The users of a simulated run: sessions as requests that follow from each other."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from common.slo import Slo
from measure.load.records import RequestRecord, SessionPlace
from measure.simulate.records import Arrival
from measure.workload.content import ContentWriter
from measure.workload.playing import Due, SessionPlay, cut_segment
from measure.workload.sessions import Segment, Session, Workload
from router.tenants import ANYBODY, Tenant

_RETURN_S = 1.0
"""Time until the place of a refused session is taken."""
_ANSWERS = 1 << 62
"""First number of the answers' contents, above those of any workload."""

IdleTime = Callable[[int, int, int], float]
"""Seconds that an idle server needs for (prompt tokens, those of them in its cache, output tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """A session that is played."""

    play: SessionPlay[Segment]
    line: Iterator[Session] | None
    """The closed loop's next sessions; None: an open loop."""


class Users:
    """All users of one simulated run. Iterate over `arrivals` once.

    Open loop: a session begins at its time, whatever became of others. Closed loop: a fixed number of sessions run at
    any time, and the next one begins when one has ended. In both, a later turn arrives its think time after the answers
    that it waits for. Nothing follows from a request that is not complete, since the rest of the conversation is not
    known. In a closed loop its place is taken a little later: refused sessions would otherwise follow each other
    without any time passing.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        slo: Slo,
        max_tokens: int | None = None,
        are_tenants: bool = False,
        idle: IdleTime | None = None,
    ) -> None:
        """`max_tokens`: limit that every request states, all that a router knows; None: the answer's length.

        `are_tenants`: every stream is a tenant of its own. `idle`: what requests of several turns are compared with.
        """
        self._workload = workload
        self._writer = ContentWriter(seed=workload.seed)
        self._slo = slo
        self._max_tokens = max_tokens
        self._are_tenants = are_tenants
        self._idle = idle
        self._num_begun = 0
        """Requests of the sessions that have begun, sent or not."""
        self._num_answers = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the first requests of every session that follows from no other session, in order of time."""
        numbers = count()
        waiting: list[tuple[float, int, Arrival]] = []

        def wait(arrivals: Sequence[Arrival]) -> None:
            for arrival in arrivals:
                heapq.heappush(waiting, (arrival.at_s, next(numbers), arrival))

        for stream in self._workload.streams:
            if stream.concurrency is not None:
                sessions = iter(stream.sessions)
                for _ in range(stream.concurrency):
                    if not (own := self._next_of(sessions, 0.0)):
                        break
                    wait(own)
        opened = [stream.sessions for stream in self._workload.streams if stream.concurrency is None]
        for session in heapq.merge(*opened, key=lambda session: session.start_s):
            if not self._may_begin(session.start_s):
                break
            while waiting and waiting[0][0] <= session.start_s:
                yield heapq.heappop(waiting)[2]
            wait(self._begin(session, session.start_s, None))
        while waiting:
            yield heapq.heappop(waiting)[2]

    def _may_begin(self, at_s: float) -> bool:
        most = self._workload.max_requests
        return at_s <= self._workload.duration_s and (most is None or self._num_begun < most)

    def _next_of(self, sessions: Iterator[Session], at_s: float) -> Sequence[Arrival]:
        """Return the first requests of a closed loop's next session; none when it may not begin."""
        session = next(sessions, None) if self._may_begin(at_s) else None
        return () if session is None else self._begin(session, max(session.start_s, at_s), sessions)

    def _begin(self, session: Session, at_s: float, line: Iterator[Session] | None) -> Sequence[Arrival]:
        self._num_begun += len(session.turns)
        seat = _Seat(play=SessionPlay(session, cut_segment), line=line)
        return [self._arrival(seat, due) for due in seat.play.begin(at_s)]

    def _arrival(self, seat: _Seat, due: Due) -> Arrival:
        """Return a session's request; the requests that follow from it are made when it has ended."""
        session, index = seat.play.session, due.turn
        turn = session.turns[index]
        segments = seat.play.prompt(index, turn.segments)
        prompt = self._writer.tokens(segments)
        self._num_answers += 1
        answer = Segment(_ANSWERS + self._num_answers, turn.num_output_tokens)
        is_alone = len(session.turns) == 1
        place = None
        if not is_alone:
            num_cached = len(prompt) - turn.num_own_tokens
            idle_s = None if self._idle is None else self._idle(len(prompt), num_cached, turn.num_output_tokens)
            place = SessionPlace(num_turns=len(session.turns), think_s=turn.think_s, idle_s=idle_s)

        def follow_up(result: RequestRecord) -> Sequence[Arrival]:
            if result.is_complete:
                following = seat.play.answered(index, answer, result.end_s)
            else:
                seat.play.failed()
                following = []
            if seat.line is not None and seat.play.is_over:
                return self._next_of(seat.line, result.end_s + (0.0 if result.is_complete else _RETURN_S))
            return [self._arrival(seat, due) for due in following]

        return Arrival(
            at_s=due.due_s,
            prompt=prompt,
            num_output_tokens=turn.num_output_tokens,
            calls_tool=turn.calls_tool,
            max_tokens=None if self._max_tokens is None else max(self._max_tokens, turn.num_output_tokens),
            answer=self._writer.tokens([answer]) if seat.play.is_continued(index) else None,
            session=session.index,
            turn=index,
            place=place,
            ttft_slo_s=self._slo.ttft_of(len(prompt)),
            kind=session.kind,
            tenant=Tenant(name=session.kind) if self._are_tenants else ANYBODY,
            follow_up=None if is_alone and seat.line is None else follow_up,
        )

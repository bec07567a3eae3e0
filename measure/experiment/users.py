"""The users of a workload, for the simulator: sessions as requests that follow from each other.

Open loop: a session's first request arrives at its time, whatever became of others. Closed loop: a fixed number of
sessions run at any time, and the next one begins when one has ended. In both, a later turn arrives its think time after
the answer before, and its prompt begins with the whole conversation. A session ends with a request that is not
complete, since the rest of the conversation is not known. In a closed loop its place is taken a little later: refused
sessions would otherwise follow each other without any time passing.
"""

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from common.slo import Slo
from measure.load.records import RequestRecord
from measure.simulate.records import Arrival
from measure.workload.sessions import Segment, Session, Turn, Workload

WARM_UP = ""
"""Kind of the requests that only warm the cluster up."""
_RETURN_S = 1.0
"""Time until the place of a refused session is taken."""
_ANSWERS = 1 << 62
"""First number of the answers' contents, above those of any workload."""


class Writer(Protocol):
    """Turns contents into tokens; see `measure.workload.content.ContentWriter`."""

    def tokens(self, segments: Sequence[Segment]) -> "array[int]":
        """Return the tokens of consecutive segments."""
        ...


class Users:
    """All users of one simulated run. Iterate over `arrivals` once."""

    def __init__(
        self, workload: Workload, writer: Writer, *, slo: Slo, warm_up_s: float = 0.0, max_tokens: int | None = None
    ) -> None:
        """`max_tokens`: limit that every request states, all that a router knows; None: the answer's length."""
        self.last_start_s = 0.0
        """Time at which the last session so far began."""
        self._workload = workload
        self._writer = writer
        self._slo = slo
        self._warm_up_s = warm_up_s
        self._max_tokens = max_tokens
        self._num_begun = 0
        """Requests of the sessions that have begun, sent or not."""
        self._num_answers = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the first request of every session that follows from no other session, in order of time."""
        closed = [stream for stream in self._workload.streams if stream.concurrency is not None]
        for stream in closed:
            sessions = iter(stream.sessions)
            for _ in range(stream.concurrency or 0):
                first = self._next_of(sessions, 0.0)
                if first is not None:
                    yield first
        opened = [stream.sessions for stream in self._workload.streams if stream.concurrency is None]
        for session in heapq.merge(*opened, key=lambda session: session.start_s):
            if not self._may_begin(session.start_s):
                return
            yield self._begin(session, session.start_s, None)

    def _may_begin(self, at_s: float) -> bool:
        most = self._workload.max_requests
        return at_s <= self._workload.duration_s and (most is None or self._num_begun < most)

    def _next_of(self, sessions: Iterator[Session], at_s: float) -> Arrival | None:
        """Return the first request of a closed loop's next session; None when it may not begin."""
        session = next(sessions, None) if self._may_begin(at_s) else None
        return None if session is None else self._begin(session, at_s, sessions)

    def _begin(self, session: Session, at_s: float, line: Iterator[Session] | None) -> Arrival:
        self._num_begun += len(session.turns)
        self.last_start_s = max(self.last_start_s, at_s)
        return self._turn(session, 0, array("I"), at_s, line)

    def _turn(
        self, session: Session, index: int, history: "array[int]", at_s: float, line: Iterator[Session] | None
    ) -> Arrival:
        """Return a session's request; the request that follows from it is made when it has ended.

        `line`: the closed loop's next sessions; None: an open loop.
        """
        turn = session.turns[index]
        is_last = index + 1 == len(session.turns)
        prompt = history + self._writer.tokens(turn.segments)
        answer = None if is_last else self._answer(turn)

        def follow_up(result: RequestRecord) -> Arrival | None:
            if answer is not None and result.is_complete:
                think_s = session.turns[index + 1].think_s
                return self._turn(session, index + 1, prompt + answer, result.end_s + think_s, line)
            if line is None:
                return None
            return self._next_of(line, result.end_s + (0.0 if result.is_complete else _RETURN_S))

        return Arrival(
            at_s=at_s,
            prompt=prompt,
            num_output_tokens=turn.num_output_tokens,
            max_tokens=None if self._max_tokens is None else max(self._max_tokens, turn.num_output_tokens),
            answer=answer,
            session=session.index,
            turn=index,
            ttft_slo_s=self._slo.ttft_of(len(prompt)),
            kind=session.kind if at_s >= self._warm_up_s else WARM_UP,
            follow_up=None if is_last and line is None else follow_up,
        )

    def _answer(self, turn: Turn) -> "array[int]":
        """Return an answer that differs from all others."""
        self._num_answers += 1
        return self._writer.tokens([Segment(_ANSWERS + self._num_answers, turn.num_output_tokens)])

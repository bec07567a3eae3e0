"""The people of a workload, for the simulator: sessions as requests that follow from each other.

Open loop: a session's first request comes at its time, whatever became of others. Closed loop: so many sessions run at
any time, and the next one begins when one has ended. Either way a later turn comes its think time after the answer
before, and its prompt begins with everything that was said until then. A session ends with a request that is not
answered to its end: what would have been said next is not known. In a closed loop its place is taken a little later,
since those who are turned away would otherwise come back for ever without any time passing.
"""

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from common.slo import Slo
from measure.simulate.records import Arrival, RequestResult
from measure.workload.sessions import Segment, Session, Turn, Workload

WARM_UP = ""
"""Kind of the requests that only warm the cluster up."""
_RETURN_S = 1.0
"""Until the place of somebody who was turned away is taken."""
_ANSWERS = 1 << 62
"""Contents of answers are numbered from here: no workload has so many contents of its own."""


class Writer(Protocol):
    """Writes contents out; see `measure.workload.content.ContentWriter`."""

    def tokens(self, segments: Sequence[Segment]) -> "array[int]":
        """Return the tokens of segments, one behind the other."""
        ...


class Users:
    """Everybody who asks in one simulated run. Iterate over `arrivals` once."""

    def __init__(
        self, workload: Workload, writer: Writer, *, slo: Slo, warm_up_s: float = 0.0, max_tokens: int | None = None
    ) -> None:
        """`max_tokens`: what every request allows, which is all that a router knows of its answer; None: its length."""
        self.last_start_s = 0.0
        """When the last session began, of those that have begun."""
        self._workload = workload
        self._writer = writer
        self._slo = slo
        self._warm_up_s = warm_up_s
        self._max_tokens = max_tokens
        self._num_begun = 0
        """Requests of the sessions that have begun, asked or not."""
        self._num_answers = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the first request of every session that follows from no other, in order of time."""
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
        """Begin a closed loop's next session, if there is one and it may."""
        session = next(sessions, None) if self._may_begin(at_s) else None
        return None if session is None else self._begin(session, at_s, sessions)

    def _begin(self, session: Session, at_s: float, line: Iterator[Session] | None) -> Arrival:
        self._num_begun += len(session.turns)
        self.last_start_s = max(self.last_start_s, at_s)
        return self._turn(session, 0, array("I"), at_s, line)

    def _turn(
        self, session: Session, index: int, history: "array[int]", at_s: float, line: Iterator[Session] | None
    ) -> Arrival:
        """Return a session's request; what follows from it is made when it has ended.

        `line`: the closed loop's next sessions; None: an open one.
        """
        turn = session.turns[index]
        is_last = index + 1 == len(session.turns)
        prompt = history + self._writer.tokens(turn.segments)
        answer = None if is_last else self._answer(turn)

        def follow_up(result: RequestResult) -> Arrival | None:
            assert result.end_s is not None, "it has ended"
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
            ttft_slo_s=self._slo.ttft_of(len(prompt)),
            kind=session.kind if at_s >= self._warm_up_s else WARM_UP,
            follow_up=None if is_last and line is None else follow_up,
        )

    def _answer(self, turn: Turn) -> "array[int]":
        """Return an answer unlike any other."""
        self._num_answers += 1
        return self._writer.tokens([Segment(_ANSWERS + self._num_answers, turn.num_output_tokens)])

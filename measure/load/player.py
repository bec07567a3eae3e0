"""Plays sessions to a target: every request at its due time, whatever became of the others.

An open loop's first requests are due when the workload says, later turns their think time after the end of the answer
before. A closed loop has places: a session is due when its place became free. A turn that is not answered to its end is
the last of its session; those that would have followed were never asked.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from common.clock import Clock
from common.errors import KvrelayError
from common.slo import Slo
from measure.load.alarm import Alarm
from measure.load.conversation import Conversation, Writer
from measure.load.records import RequestRecord
from measure.load.sending import Cancellation, PreparedRequest, send
from measure.load.targets.interface import ChunkSink, Target, TargetAnswer, TargetRequest
from measure.workload.sessions import Content, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for all requests of a run."""

    content: Content
    seed: int
    origin_s: float
    """When the run began, on the monotonic clock that all processes of a machine share."""
    duration_s: float
    """No session of a closed loop begins later."""
    timeout_s: float
    slo: Slo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a player works with."""

    target: Target
    writer: Writer
    alarm: Alarm
    clock: Clock


class Reporter(Protocol):
    """Whom a player tells, on its event loop."""

    def record(self, request: RequestRecord) -> None:
        """Take a request that has ended; its index is 0."""

    def session_over(self, stream: int | None) -> None:
        """Note that nothing more will come of a session of this closed loop (None: an open loop)."""

    def session_begun(self, stream: int) -> None:
        """Note that a session of a closed loop has taken a place."""

    def place_returned(self, stream: int) -> None:
        """Note that a place that was asked back is free."""


@dataclass(slots=True)
class _Play:
    """A session that is being played."""

    session: Session
    conversation: Conversation
    request: PreparedRequest
    """The next one."""


@dataclass(slots=True)
class _Places:
    """Of one closed loop."""

    free_s: deque[float] = field(default_factory=deque)
    """Free places, by when they became so."""
    waiting: deque[_Play] = field(default_factory=deque)
    """Sessions that wait for one. Either this or `free_s` is empty."""
    num_asked_back: int = 0


class Player:
    """Plays sessions side by side, as tasks of `tasks`. One event loop."""

    def __init__(self, tools: Tools, terms: Terms, reporter: Reporter, tasks: asyncio.TaskGroup) -> None:
        self._target, self._writer, self._alarm, self._clock = tools.target, tools.writer, tools.alarm, tools.clock
        self._terms = terms
        self._reporter = reporter
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._places: dict[int, _Places] = {}
        self._is_stopped = False

    def play(self, session: Session) -> None:
        """Play a session of an open loop; its first prompt is written out now."""
        self._start(self._written(session), session.start_s, None)

    def play_in_place(self, session: Session, stream: int) -> None:
        """Play a session of a closed loop as soon as one of its places is free; its first prompt is written out now."""
        places = self._places.setdefault(stream, _Places())
        places.waiting.append(self._written(session))
        self._fill(stream)

    def grant(self, stream: int, num_places: int) -> None:
        """Add places to a closed loop."""
        self._places.setdefault(stream, _Places()).free_s.extend([self._now_s()] * num_places)
        self._fill(stream)

    def ask_back(self, stream: int, num_places: int) -> None:
        """Take places from a closed loop, as they become free."""
        self._places[stream].num_asked_back += num_places
        self._fill(stream)

    def stop(self) -> None:
        """Send nothing more and cancel what runs, on the server as well; what runs is recorded as cancelled."""
        self._is_stopped = True
        for task in self._running:
            task.cancel()

    def _fill(self, stream: int) -> None:
        """Bring free places, those who want them back and those who wait together."""
        places = self._places[stream]
        while places.free_s and places.num_asked_back:
            places.free_s.pop()
            places.num_asked_back -= 1
            self._reporter.place_returned(stream)
        while places.free_s and places.waiting and not self._is_stopped:
            play = places.waiting.popleft()
            if places.free_s[0] <= self._terms.duration_s:
                self._reporter.session_begun(stream)
                self._start(play, places.free_s.popleft(), stream)
            else:
                self._reporter.session_over(stream)

    def _start(self, play: _Play, due_s: float, stream: int | None) -> None:
        if not self._is_stopped:
            task = self._tasks.create_task(self._play(play, due_s, stream))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _play(self, play: _Play, due_s: float, stream: int | None) -> None:
        try:
            end_s = await self._turns(play, due_s)
        except Cancellation as cancelled:
            self._reporter.record(cancelled.record)
            return
        self._reporter.session_over(stream)
        if stream is not None:
            self._places[stream].free_s.append(end_s)
            self._fill(stream)

    async def _turns(self, play: _Play, due_s: float) -> float:
        """Ask every turn at its time; return when the last answer ended."""
        turns = play.session.turns
        while True:
            await self._alarm.until(self._terms.origin_s + due_s)
            ended = await send(play.request, due_s=due_s, clock=self._clock, origin_s=self._terms.origin_s)
            record = ended.record
            self._reporter.record(record)
            next_idx = record.turn + 1
            if ended.answer is None or next_idx == len(turns):
                return record.end_s
            play.conversation.hear(ended.answer, record.num_output_tokens)
            play.request = self._prepared(play.session, play.conversation, next_idx)
            due_s = record.end_s + turns[next_idx].think_s

    def _written(self, session: Session) -> _Play:
        conversation = Conversation(session, self._terms.content, self._writer)
        return _Play(
            session=session, conversation=conversation, request=self._prepared(session, conversation, turn_idx=0)
        )

    def _prepared(self, session: Session, conversation: Conversation, turn_idx: int) -> PreparedRequest:
        turn, slo = session.turns[turn_idx], self._terms.slo
        prompt = conversation.ask(turn)
        request = TargetRequest(
            prompt=prompt,
            num_prompt_tokens=conversation.num_tokens,
            num_output_tokens=turn.num_output_tokens,
            seed=_seed(self._terms.seed, session.index, turn_idx),
            timeout_s=self._terms.timeout_s,
            ttft_slo_s=slo.ttft_of(conversation.num_tokens) if slo is not None else None,
            itl_slo_s=slo.itl_s if slo is not None else None,
            wants_token_ids=self._terms.content is Content.TOKENS and turn_idx + 1 < len(session.turns),
        )
        try:
            call = self._target.prepare(request)
        except KvrelayError as error:
            call = _Failing(error)
        return PreparedRequest(
            session=session.index,
            turn=turn_idx,
            kind=session.kind,
            num_prompt_tokens=request.num_prompt_tokens,
            num_wanted_tokens=request.num_output_tokens,
            call=call,
        )

    def _now_s(self) -> float:
        """Seconds since the run began; 0 before."""
        return max(0.0, self._clock.monotonic() - self._terms.origin_s)


class _Failing:
    """Stands for a request that cannot be written; it fails when it is due, like one that the server rejects."""

    def __init__(self, error: KvrelayError) -> None:
        self._error = error

    async def __call__(self, on_chunk: ChunkSink) -> TargetAnswer:
        raise self._error


def _seed(seed: int, session: int, turn: int) -> int:
    """Sampling seed of a request: the same in every run of a workload."""
    return (seed * 1_000_003 + session * 65_537 + turn) % (1 << 31)

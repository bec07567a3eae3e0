"""Plays sessions to a target: every request at its due time, whatever happens to the others.

In an open loop a session's first request is due at a planned time; later turns are due their think time after the end
of the answer before. A closed loop has places: a session is due when its place becomes free. A turn without a complete
answer is the last of its session.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from common.clock import Clock
from common.errors import KvrelayError
from common.slo import Slo
from measure.load.alarm import Alarm
from measure.load.records import RequestRecord
from measure.load.sending import Cancellation, PreparedRequest, SessionHistory, Writer, send
from measure.load.targets.interface import ChunkSink, Target, TargetAnswer, TargetRequest
from measure.workload.sessions import Content, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """Settings that hold for all requests of a run."""

    content: Content
    seed: int
    origin_s: float
    """Start of the run on the monotonic clock, which all processes of a machine share."""
    duration_s: float
    """Time after which no session of a closed loop begins."""
    timeout_s: float
    slo: Slo | None = None
    first_token: int = 0
    """Lowest token id in prompts."""
    num_tokens: int = 1 << 20
    """Number of token ids in prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Collaborators of a player."""

    target: Target
    writer: Writer
    alarm: Alarm
    clock: Clock


class Reporter(Protocol):
    """Receives the reports of a player, on its event loop."""

    def record(self, request: RequestRecord) -> None:
        """Take an ended request; its index is 0."""

    def session_over(self, stream: int | None) -> None:
        """Note the end of a session of a closed loop (None: of an open loop)."""

    def session_begun(self, stream: int) -> None:
        """Note that a session of a closed loop has taken a place."""

    def place_returned(self, stream: int) -> None:
        """Note that a place was given back."""


@dataclass(slots=True)
class _Play:
    """A session in play."""

    history: SessionHistory
    request: PreparedRequest


@dataclass(slots=True)
class _Places:
    """Places of one closed loop."""

    free_s: deque[float] = field(default_factory=deque)
    """Times at which the free places became free."""
    waiting: deque[_Play] = field(default_factory=deque)
    """Sessions that wait for a place. Either this or `free_s` is empty."""
    num_asked_back: int = 0


class Player:
    """Plays sessions concurrently, as tasks of `tasks`. One event loop."""

    def __init__(self, tools: Tools, terms: RequestTerms, reporter: Reporter, tasks: asyncio.TaskGroup) -> None:
        self._target, self._writer, self._alarm, self._clock = tools.target, tools.writer, tools.alarm, tools.clock
        self._terms = terms
        self._reporter = reporter
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._places: dict[int, _Places] = {}
        self._is_stopped = False

    def play(self, session: Session) -> None:
        """Play a session of an open loop; its first prompt is written now."""
        self._start(self._written(session), session.start_s, None)

    def play_in_place(self, session: Session, stream: int) -> None:
        """Play a session of a closed loop as soon as a place is free; its first prompt is written now."""
        places = self._places.setdefault(stream, _Places())
        places.waiting.append(self._written(session))
        self._fill(stream)

    def move_places(self, stream: int, num_places: int) -> None:
        """Add places to a closed loop or, with a negative number, take some back as they become free."""
        places = self._places.setdefault(stream, _Places())
        places.free_s.extend([self._now_s()] * num_places)
        places.num_asked_back += max(0, -num_places)
        self._fill(stream)

    def stop(self) -> None:
        """Send nothing more; cancel running requests, on the server as well, and record them as cancelled."""
        self._is_stopped = True
        for task in self._running:
            task.cancel()

    def _fill(self, stream: int) -> None:
        """Give free places back where asked to, and to waiting sessions otherwise."""
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
        """Send every turn at its time; return the end of the last answer."""
        turns = play.request.session.turns
        while True:
            await self._alarm.until(self._terms.origin_s + due_s)
            ended = await send(play.request, due_s=due_s, clock=self._clock, origin_s=self._terms.origin_s)
            record = ended.record
            self._reporter.record(record)
            next_idx = record.turn + 1
            if ended.answer is None or next_idx == len(turns):
                return record.end_s
            play.history.hear(ended.answer, record.num_output_tokens)
            play.request = self._prepared(play.request.session, play.history, next_idx)
            due_s = record.end_s + turns[next_idx].think_s

    def _written(self, session: Session) -> _Play:
        history = SessionHistory(session, self._terms.content, self._writer)
        return _Play(history=history, request=self._prepared(session, history, turn_idx=0))

    def _prepared(self, session: Session, history: SessionHistory, turn_idx: int) -> PreparedRequest:
        turn, slo = session.turns[turn_idx], self._terms.slo
        prompt = history.ask(turn)
        request = TargetRequest(
            prompt=prompt,
            num_prompt_tokens=history.num_tokens,
            num_output_tokens=turn.num_output_tokens,
            seed=_seed(self._terms.seed, session.index, turn_idx),
            timeout_s=self._terms.timeout_s,
            ttft_slo_s=slo.ttft_of(history.num_tokens) if slo is not None else None,
            tpot_slo_s=slo.tpot_s if slo is not None else None,
            wants_token_ids=self._terms.content is Content.TOKENS and turn_idx + 1 < len(session.turns),
        )
        try:
            call = self._target.prepare(request)
        except KvrelayError as error:
            call = _Failing(error)
        return PreparedRequest(session=session, turn=turn_idx, asked=request, call=call)

    def _now_s(self) -> float:
        """Return the seconds since the run began; 0 before."""
        return max(0.0, self._clock.monotonic() - self._terms.origin_s)


class _Failing:
    """A request that cannot be written; it fails when it is due, like one that the server rejects."""

    def __init__(self, error: KvrelayError) -> None:
        self._error = error

    async def __call__(self, on_chunk: ChunkSink) -> TargetAnswer:
        raise self._error


def _seed(seed: int, session: int, turn: int) -> int:
    """Return the sampling seed of a request, the same in every run of a workload."""
    return (seed * 1_000_003 + session * 65_537 + turn) % (1 << 31)

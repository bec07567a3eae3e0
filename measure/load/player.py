"""Plays sessions to a target: every request at its due time, whatever happens to the others.

A session begins at its start, in a closed loop as soon as its first requests are written; later turns are due their
think time after the answers that they wait for. Nothing follows a turn without a complete answer.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.clock import Clock
from common.errors import KvrelayError
from common.slo import Slo
from measure.load.records import RequestRecord
from measure.load.sending import PreparedRequest, SessionText, Writer, send, until
from measure.load.targets.interface import ChunkSink, Target, TargetAnswer, TargetRequest
from measure.workload.playing import Due
from measure.workload.sessions import Content, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """Settings that hold for all requests of a run."""

    content: Content
    seed: int
    origin_s: float
    """Start of the run on the monotonic clock, which all processes of a machine share."""
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
    clock: Clock


class Reporter(Protocol):
    """Receives the reports of a player, on its event loop."""

    def record(self, request: RequestRecord) -> None:
        """Take an ended request; its index is 0."""

    def session_over(self, stream: int | None) -> None:
        """Note the end of a session, and the closed loop that it belongs to (None: an open loop)."""


class Player:
    """Plays sessions concurrently, as tasks of `tasks`. One event loop."""

    def __init__(self, tools: Tools, terms: RequestTerms, reporter: Reporter, tasks: asyncio.TaskGroup) -> None:
        self._target, self._writer, self._clock = tools.target, tools.writer, tools.clock
        self._terms = terms
        self._reporter = reporter
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def play(self, session: Session, stream: int | None = None) -> None:
        """Play a session, of a closed loop where `stream` names one; its first prompts are written now."""
        if not self._is_stopped:
            text = SessionText(session, self._terms.content, self._writer)
            begin_s = session.start_s
            if stream is not None:
                begin_s = max(begin_s, self._clock.monotonic() - self._terms.origin_s)
            self._send_all(text, text.play.begin(begin_s), stream)

    def stop(self) -> None:
        """Send nothing more; cancel running requests, on the server as well, and record them as cancelled."""
        self._is_stopped = True
        for task in self._running:
            task.cancel()

    def _send_all(self, text: SessionText, due: Sequence[Due], stream: int | None) -> None:
        """Write the requests of these turns, and send each at its time."""
        for each in due:
            task = self._tasks.create_task(self._send(text, self._prepared(text, each.turn), each.due_s, stream))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _send(self, text: SessionText, request: PreparedRequest, due_s: float, stream: int | None) -> None:
        origin_s = self._terms.origin_s
        await until(origin_s + due_s, self._clock)
        record, answer = await send(request, due_s=due_s, clock=self._clock, origin_s=origin_s)
        self._reporter.record(record)
        if answer is None:
            text.play.failed()
        else:
            due = text.answered(request.turn, answer, record)
            if not self._is_stopped:
                self._send_all(text, due, stream)
        if text.play.is_over:
            self._reporter.session_over(stream)

    def _prepared(self, text: SessionText, turn_idx: int) -> PreparedRequest:
        session, slo = text.play.session, self._terms.slo
        num_prompt_tokens, prompt = text.ask(turn_idx)
        request = TargetRequest(
            prompt=prompt,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=session.turns[turn_idx].num_output_tokens,
            seed=_seed(self._terms.seed, session.index, turn_idx),
            timeout_s=self._terms.timeout_s,
            ttft_slo_s=slo.ttft_of(num_prompt_tokens) if slo is not None else None,
            tpot_slo_s=slo.tpot_s if slo is not None else None,
            wants_token_ids=self._terms.content is Content.TOKENS and text.play.is_continued(turn_idx),
        )
        try:
            call = self._target.prepare(request)
        except KvrelayError as error:
            call = _Failing(error)
        return PreparedRequest(session=session, turn=turn_idx, asked=request, call=call)


class _Failing:
    """A request that cannot be written; it fails when it is due, like one that the server rejects."""

    def __init__(self, error: KvrelayError) -> None:
        self._error = error

    async def __call__(self, on_chunk: ChunkSink) -> TargetAnswer:
        raise self._error


def _seed(seed: int, session: int, turn: int) -> int:
    """Return the sampling seed of a request, the same in every run of a workload."""
    return (seed * 1_000_003 + session * 65_537 + turn) % (1 << 31)

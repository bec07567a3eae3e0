"""Writes the prompts of a session, sends its requests one by one, and records their times."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from common.clock import Clock
from common.errors import KvrelayError
from common.tokens import TokenArray
from kvrelay.client.chat import ChatMessage
from measure.load.records import Outcome, RequestRecord, ServerReport, SessionPlace
from measure.load.targets.interface import PreparedCall, TargetAnswer, TargetRequest
from measure.workload.playing import Due, SessionPlay
from measure.workload.sessions import Content, Segment, Session

_FILLERS = 1 << 62
"""Lowest content number of answers whose token ids the server does not report; workloads use lower ones."""
_MAX_TURNS = 1 << 16


class Writer(Protocol):
    """Writes segments as tokens or text (`measure.workload.content.ContentWriter`)."""

    def tokens(self, segments: Sequence[Segment]) -> TokenArray:
        """Return the token ids of the segments."""

    def text(self, segments: Sequence[Segment]) -> str:
        """Return the words of the segments."""


@dataclass(frozen=True, slots=True)
class Said:
    """A part of a conversation: what a turn adds, or the server's answer."""

    num_tokens: int
    """Planned length; an answer's real one."""
    tokens: TokenArray
    """Empty where prompts are text."""
    text: str
    """Empty where prompts are token ids."""
    role: str

    def leading(self, num_tokens: int) -> "Said":
        """Return its first tokens; of text as many words, about one per token."""
        words = " ".join(self.text.split(" ")[:num_tokens])
        return Said(num_tokens, self.tokens[:num_tokens], words, self.role)


class SessionText:
    """Writes the prompts of one session.

    They hold the server's real answers, as token ids or text, so that a cache has them. With `Content.TOKENS` and a
    server that reports no token ids, each answer is replaced by as many planned tokens, which no cache holds.
    """

    def __init__(self, session: Session, content: Content, writer: Writer) -> None:
        self.play = SessionPlay(session, Said.leading)
        self._content = content
        self._writer = writer

    def ask(self, index: int) -> tuple[int, str | Sequence[int] | Sequence[ChatMessage]]:
        """Return the planned length of a turn's prompt, and the prompt, which later calls do not change."""
        turn = self.play.session.turns[index]
        is_tokens = self._content is Content.TOKENS
        own = Said(
            turn.num_own_tokens,
            self._writer.tokens(turn.segments) if is_tokens else array("I"),
            "" if is_tokens else self._writer.text(turn.segments),
            "user",
        )
        said = self.play.prompt(index, (own,))
        num_tokens = sum(each.num_tokens for each in said)
        if is_tokens:
            prompt: TokenArray = array("I")
            for each in said:
                prompt += each.tokens
            return num_tokens, prompt
        messages = tuple(
            ChatMessage(role=role, content=" ".join(each.text for each in group))
            for role, group in groupby(said, key=lambda each: each.role)
        )
        is_chat = self._content is Content.CHAT
        return num_tokens, messages if is_chat else " ".join(message.content for message in messages)

    def answered(self, index: int, answer: TargetAnswer, record: RequestRecord) -> list[Due]:
        """Note a turn's answer, and return the turns that are due because of it."""
        num_tokens, tokens = record.num_output_tokens, array("I")
        if self._content is Content.TOKENS and answer.token_ids is not None:
            tokens = array("I", answer.token_ids)
        elif self._content is Content.TOKENS:
            content = _FILLERS + self.play.session.index * _MAX_TURNS + index
            tokens = self._writer.tokens((Segment(content=content, num_tokens=num_tokens),))
        text = "" if self._content is Content.TOKENS else answer.text
        return self.play.answered(index, Said(num_tokens, tokens, text, "assistant"), record.end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that waits for its due time."""

    session: Session
    turn: int
    asked: TargetRequest
    call: PreparedCall

    @property
    def place(self) -> SessionPlace | None:
        """Its place among the requests of its session; None in a session of one."""
        turns = self.session.turns
        return SessionPlace(num_turns=len(turns), think_s=turns[self.turn].think_s) if len(turns) > 1 else None


class ChunkLog:
    """Arrival times of tokens, in seconds since `origin_s`; a `ChunkSink`."""

    def __init__(self, clock: Clock, origin_s: float) -> None:
        self._clock = clock
        self._origin_s = origin_s
        self.times_s: list[float] = []
        self.num_tokens: list[int] = []

    def __call__(self, num_tokens: int) -> None:
        """Note the arrival of tokens."""
        self.times_s.append(self._clock.monotonic() - self._origin_s)
        self.num_tokens.append(num_tokens)


async def until(when_s: float, clock: Clock) -> None:
    """Return at `when_s`, never before it; a loop's timers are late by up to a millisecond."""
    while (wait_s := when_s - clock.monotonic()) > 0:  # noqa: ASYNC110 - no event signals the time
        await asyncio.sleep(wait_s)


async def send(
    request: PreparedRequest, *, due_s: float, clock: Clock, origin_s: float
) -> tuple[RequestRecord, TargetAnswer | None]:
    """Send a request now and read its answer; return its record, and the answer if it is complete.

    Cancelling the call cancels the request on the server; it returns the record all the same.
    """
    log = ChunkLog(clock, origin_s)
    sent_s = clock.monotonic() - origin_s
    answer: TargetAnswer | None = None
    outcome, error = Outcome.COMPLETED, ""
    try:
        answer = await request.call(log)
    except asyncio.CancelledError:
        outcome = Outcome.CANCELLED
    except KvrelayError as failure:
        outcome = Outcome.of(failure, has_tokens=any(log.num_tokens))
        error = f"{type(failure).__name__}: {failure.message}"
    end_s = clock.monotonic() - origin_s
    num_prompt_tokens = None if answer is None else answer.num_prompt_tokens
    num_tokens = settled(log.num_tokens, None if answer is None else answer.num_output_tokens)
    record = RequestRecord(
        session=request.session.index,
        turn=request.turn,
        kind=request.session.kind,
        due_s=due_s,
        sent_s=sent_s,
        chunk_s=tuple(at_s for at_s, num in zip(log.times_s, num_tokens, strict=True) if num),
        chunk_tokens=tuple(filter(None, num_tokens)),
        end_s=end_s,
        outcome=outcome,
        error=error,
        num_prompt_tokens=request.asked.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens,
        num_wanted_tokens=request.asked.num_output_tokens,
        place=request.place,
        server=ServerReport() if answer is None else answer.report,
    )
    return record, answer


def settled(counts: list[int], num_counted: int | None) -> tuple[int, ...]:
    """Return the number of tokens in each piece, with the sum that the server counted.

    A piece of 0, which had neither text nor ids, is a token if the sum is right with all of these, or with all that
    followed the first token. Otherwise the server reported no ids and each other piece counted as one token: the tokens
    are spread evenly over those, larger shares first.
    """
    if not num_counted or num_counted == sum(counts) or not counts:
        return tuple(counts)
    first = next((position for position, count in enumerate(counts) if count), 0)
    for begin in (0, first):
        if num_counted == sum(count or 1 for count in counts[begin:]):
            return (*counts[:begin], *(count or 1 for count in counts[begin:]))
    pieces = [position for position, count in enumerate(counts) if count or not any(counts)]
    share, rest = divmod(num_counted, len(pieces))
    shares = dict(zip(pieces, (share + (rank < rest) for rank in range(len(pieces))), strict=True))
    return tuple(shares.get(position, 0) for position in range(len(counts)))

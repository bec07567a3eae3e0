"""The history of a session, and the prompts that it makes."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from common.tokens import TokenArray
from kvrelay.client.records import ChatMessage
from measure.load.targets.interface import TargetAnswer
from measure.workload.sessions import Content, Segment, Session, Turn

_FILLERS = 1 << 62
"""Lowest content number of answers whose token ids the server does not report; workloads use lower ones."""
_MAX_TURNS = 1 << 16


class Writer(Protocol):
    """Writes segments as tokens or text (`measure.workload.content.ContentWriter`)."""

    def tokens(self, segments: Sequence[Segment]) -> TokenArray:
        """Return the token ids of the segments."""

    def text(self, segments: Sequence[Segment]) -> str:
        """Return the words of the segments."""


class Conversation:
    """The history of one session.

    It holds the server's real answers, as token ids or text, so that later turns find them in a cache. With
    `Content.TOKENS` and a server that reports no token ids, each answer is replaced by as many planned tokens, which no
    cache holds.
    """

    def __init__(self, session: Session, content: Content, writer: Writer) -> None:
        self._session = session
        self._content = content
        self._writer = writer
        self._tokens: TokenArray = array("I")
        self._texts: list[str] = []
        self._messages: list[ChatMessage] = []
        self._num_turns = 0
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Planned length of the last prompt; answers count with their real lengths."""
        return self._num_tokens

    def ask(self, turn: Turn) -> str | Sequence[int] | Sequence[ChatMessage]:
        """Add the segments of a turn and return the prompt, which later calls do not change."""
        self._num_turns += 1
        self._num_tokens += sum(segment.num_tokens for segment in turn.segments)
        match self._content:
            case Content.TOKENS:
                self._tokens = self._tokens + self._writer.tokens(turn.segments)
                return self._tokens
            case Content.TEXT:
                self._texts.append(self._writer.text(turn.segments))
                return " ".join(self._texts)
            case Content.CHAT:
                self._messages.append(ChatMessage(role="user", content=self._writer.text(turn.segments)))
                return tuple(self._messages)

    def hear(self, answer: TargetAnswer, num_tokens: int) -> None:
        """Add an answer of `num_tokens` tokens."""
        self._num_tokens += num_tokens
        match self._content:
            case Content.TOKENS:
                self._tokens = self._tokens + self._ids(answer, num_tokens)
            case Content.TEXT:
                self._texts.append(answer.text)
            case Content.CHAT:
                self._messages.append(ChatMessage(role="assistant", content=answer.text))

    def _ids(self, answer: TargetAnswer, num_tokens: int) -> TokenArray:
        if answer.token_ids is not None:
            return array("I", answer.token_ids)
        content = _FILLERS + self._session.index * _MAX_TURNS + self._num_turns
        return self._writer.tokens((Segment(content=content, num_tokens=num_tokens),))

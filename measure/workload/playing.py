"""Plays one session: which turns are due, and what their prompts begin with. Bookkeeping only: no clock, no network.

The pieces of texts are the player's: segments where answers are planned, real tokens or messages where they are heard.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from measure.workload.sessions import Segment, Session


class Piece(Protocol):
    """A part of a text."""

    @property
    def num_tokens(self) -> int:
        """Its length."""


_P = TypeVar("_P", bound=Piece)


@dataclass(frozen=True, slots=True)
class Due:
    """A turn that is to be sent."""

    turn: int
    due_s: float


class SessionPlay(Generic[_P]):
    """A session that is played. Each text is kept until the last prompt that begins with it."""

    def __init__(self, session: Session, cut: Callable[[_P, int], _P]) -> None:
        """`cut`: returns the leading tokens of a piece."""
        self.session = session
        self._cut = cut
        self._waits_for = {index: set(session.waits_for(index)) for index in range(len(session.turns))}
        self._followers: dict[int, list[int]] = {}
        for index, waits in self._waits_for.items():
            for before in waits:
                self._followers.setdefault(before, []).append(index)
        self._sources = [_source(session, index) for index in range(len(session.turns))]
        self._num_uses = Counter(self._sources)
        self._texts: dict[int | None, tuple[_P, ...]] = {}
        self._prompts: dict[int, tuple[_P, ...]] = {}
        self._num_open = 0
        self._is_stopped = False

    @property
    def is_over(self) -> bool:
        """Whether no turn is due or running any more."""
        return not self._num_open

    def is_continued(self, index: int) -> bool:
        """Return whether a prompt that is still to come begins with a turn's text."""
        return self._num_uses[index] > 0

    def begin(self, start_s: float) -> list[Due]:
        """Return the turns that wait for no answer."""
        return self._due([index for index, waits in self._waits_for.items() if not waits], start_s)

    def prompt(self, index: int, own: Sequence[_P]) -> tuple[_P, ...]:
        """Return the prompt of a turn that is due, whose own pieces are `own`. Called once for each."""
        source, kept = self._sources[index], self.session.turns[index].beginning
        text = self._texts.get(source, ())
        if source is not None:
            self._num_uses[source] -= 1
            if not self._num_uses[source]:
                del self._texts[source]
        leading = text if kept is None else self._leading(text, kept.num_tokens)
        self._prompts[index] = (*leading, *own)
        return self._prompts[index]

    def answered(self, index: int, answer: _P, end_s: float) -> list[Due]:
        """Note a turn's complete answer, and return the turns that are due because of it."""
        self._num_open -= 1
        text = (*self._prompts.pop(index), answer)
        if self.is_continued(index):
            self._texts[index] = text
        waiting = self._followers.pop(index, [])
        for follower in waiting:
            self._waits_for[follower].discard(index)
        if self._is_stopped:
            return []
        return self._due([follower for follower in waiting if not self._waits_for[follower]], end_s)

    def failed(self) -> None:
        """Note a turn without a complete answer: no further turn becomes due."""
        self._num_open -= 1
        self._is_stopped = True

    def _due(self, indices: Sequence[int], end_s: float) -> list[Due]:
        self._num_open += len(indices)
        for index in indices:
            del self._waits_for[index]
        return [Due(index, end_s + self.session.turns[index].think_s) for index in indices]

    def _leading(self, text: tuple[_P, ...], num_tokens: int) -> tuple[_P, ...]:
        for position, piece in enumerate(text):
            if piece.num_tokens >= num_tokens:
                return (*text[:position], *((self._cut(piece, num_tokens),) if num_tokens else ()))
            num_tokens -= piece.num_tokens
        return text


def cut_segment(segment: Segment, num_tokens: int) -> Segment:
    """Return the leading tokens of a segment."""
    return Segment(segment.content, num_tokens)


def _source(session: Session, index: int) -> int | None:
    """Return the turn whose text a prompt begins with; None without one."""
    kept = session.turns[index].beginning
    if kept is None:
        return index - 1 if index else None
    return kept.turn if kept.num_tokens else None

"""A workload as data: sessions of turns, whose prompts are recipes.

A recipe refers to pieces of content by number, so that a workload of millions of tokens is small, can be sent to
another process, and stands for the same tokens everywhere (`measure.workload.content`).

A session is a closed loop: a turn is due its think time after the answers that it waits for, and its prompt begins with
the text of an earlier turn. A plain conversation waits for, and begins with, the turn before; agents that work side by
side are turns that wait for the same one.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Content(enum.StrEnum):
    """Form of prompts."""

    TOKENS = "tokens"
    """Exact token ids."""
    TEXT = "text"
    """Words, about one per token, to be continued."""
    CHAT = "chat"
    """The same words as messages of a conversation."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt: equal contents are equal tokens or words, in every session of a run."""

    content: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a prompt begins with: leading tokens of the text of an earlier turn, which is its prompt and its answer."""

    turn: int
    num_tokens: int
    """0: the prompt begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session."""

    segments: tuple[Segment, ...]
    """Segments that follow the beginning of its prompt."""
    num_output_tokens: int
    """Exact length of the answer."""
    calls_tool: bool = False
    """Whether the answer ends with calls of tools, as far as is known."""
    think_s: float = 0.0
    """Time from the last of the answers that it waits for to this request; without any, from the session's begin."""
    beginning: Beginning | None = None
    """None: the whole text of the turn before; nothing in the first turn."""
    after: tuple[int, ...] | None = None
    """Turns whose answers it waits for, that of its beginning among them or before them; None: the turn before."""

    @property
    def num_own_tokens(self) -> int:
        """Tokens of its segments."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation: requests with think times between them."""

    index: int
    """Number, unique in a workload."""
    kind: str
    """Name of the stream that it belongs to; results are grouped by it."""
    start_s: float
    """Time at which it begins, since the run began. In a closed loop the earliest time: it needs a free place."""
    turns: tuple[Turn, ...]

    def waits_for(self, index: int) -> tuple[int, ...]:
        """Return the turns whose answers a turn waits for."""
        after = self.turns[index].after
        return after if after is not None else () if index == 0 else (index - 1,)

    def prompt_lengths(self) -> list[int]:
        """Return the planned tokens of each turn's prompt."""
        lengths: list[int] = []
        for index, turn in enumerate(self.turns):
            kept = turn.beginning
            if kept is not None:
                before = kept.num_tokens
            else:
                before = lengths[-1] + self.turns[index - 1].num_output_tokens if index else 0
            lengths.append(before + turn.num_own_tokens)
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Sessions of one kind."""

    kind: str
    sessions: Iterable[Session]
    """Sessions in order of `start_s`; every iteration gives equal ones. May be endless in a closed loop."""
    concurrency: int | None = None
    """Closed loop: number of sessions at any time; the next begins when one ends. None: open loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All requests of one run."""

    name: str
    content: Content
    streams: tuple[Stream, ...]
    duration_s: float
    """Time after which no session begins; running ones continue to their last turn."""
    seed: int = 0
    """Seed of the contents: runs with different seeds share no prompts."""
    max_requests: int | None = None
    """Number of requests after which no session begins."""

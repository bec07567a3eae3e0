"""A workload as data: sessions of turns, whose prompts are recipes.

A recipe refers to pieces of content by number, so that a workload of millions of tokens is small, can be sent to
another process, and stands for the same tokens everywhere (`measure.workload.content`).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session."""

    segments: tuple[Segment, ...]
    """Segments that it adds to the history of its session, answers included."""
    num_output_tokens: int
    """Exact length of the answer."""
    think_s: float = 0.0
    """Time from the end of the previous answer to this request; 0 in the first turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation: requests with think times between them."""

    index: int
    """Number, unique in a workload."""
    kind: str
    """Name of the stream that it belongs to; results are grouped by it."""
    start_s: float
    """Due time of its first request, since the run began. 0 in a closed loop: as soon as a place is free."""
    turns: tuple[Turn, ...]


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

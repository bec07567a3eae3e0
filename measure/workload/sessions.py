"""A workload as data: sessions of turns, whose prompts are recipes.

A recipe names pieces of content by number instead of holding them, so that a workload of millions of tokens is small,
can be sent to another process, and means the same tokens wherever it is written out (`measure.workload.content`).
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Content(enum.StrEnum):
    """What prompts are made of."""

    TOKENS = "tokens"
    """Exact token ids."""
    TEXT = "text"
    """Words, about one for each token, to be continued."""
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
    """What it adds behind everything that was said before in its session, answers included."""
    num_output_tokens: int
    """Length of the answer, exactly."""
    think_s: float = 0.0
    """From the end of the answer before to this request. 0 in the first turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Somebody who asks, reads the answer, thinks, and asks again."""

    index: int
    """Unique in a workload."""
    kind: str
    """Name of the stream that it belongs to; results are told apart by it."""
    start_s: float
    """When its first request is due, since the run began. In a closed loop 0: as soon as a place is free."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Sessions of one kind."""

    kind: str
    sessions: Iterable[Session]
    """In order of `start_s`; can be iterated over again, with equal results. May be endless in a closed loop."""
    concurrency: int | None = None
    """Closed loop: so many sessions run at any time, the next one begins when one has ended. None: open loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that is asked in one run."""

    name: str
    content: Content
    streams: tuple[Stream, ...]
    duration_s: float
    """No session begins later. Those that run then are served to their last turn."""
    seed: int = 0
    """Other seeds, other contents: nothing is shared between the prompts of runs with different seeds."""
    max_requests: int | None = None
    """No session begins after so many requests."""

"""The seam between a method of drafting and the decision how much of its drafts to verify."""

from dataclasses import dataclass
from typing import Protocol

from common.tokens import TokenArray
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Tokens that may follow a sequence's known ones."""

    token_ids: TokenArray
    chances: list[float]
    """Estimated probability that each of them, and all before it, will be accepted: it never rises."""


class Drafter(Protocol):
    """A method of drafting. Its drafts decide how fast an answer comes, never what it says. Engine thread only."""

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        """Return a draft of at most `max_tokens` tokens, empty where there is none, and learn from the last one."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        ...

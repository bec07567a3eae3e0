"""The seam between a method of drafting and the decision how much of its drafts to verify.

A method first tells how likely it is to be right (`prospects`) and how long it takes (`costs_s`); what is worth
verifying is then drafted. So a method that has to compute its drafts computes none in vain.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from common.tokens import TokenArray
from engine.executor import StepResult
from engine.sequence import Sequence


class Drafter(Protocol):
    """A method of drafting. Under the coupled rule its drafts decide how fast an answer comes, never what it says.

    Engine thread only.
    """

    def prospects(self, sequence: Sequence, max_tokens: int) -> list[float]:
        """Return the estimated probabilities that a draft's first token is accepted, its first two, and so on.

        They never rise; at most `max_tokens`, none where there is no draft.
        """
        ...

    def draft(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, TokenArray]:
        """Return drafts of at most so many tokens for sequences that have prospects of so many."""
        ...

    def costs_s(self, num_sequences: int, num_tokens: int) -> Seq[float] | None:
        """Return the seconds of drafting 0 to `num_tokens` tokens for so many sequences; None: it takes none."""
        ...

    def observe(self, sequence: Sequence, num_drafted: int, result: StepResult) -> None:
        """Learn from a step that sampled for a sequence, with a draft of `num_drafted` tokens or without."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        ...

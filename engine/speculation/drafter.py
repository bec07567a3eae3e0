"""The seam between a method of drafting and the decision how much of its drafts to verify.

A method first reports how likely it is to be right (`prospects`) and how long it takes (`costs_s`); what is worth
verifying is then drafted. So a method that has to compute its drafts computes none in vain.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from common.tokens import TokenArray, as_tokens
from engine.executor import Branch, ScheduledSequence, StepResult
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow, and others that may follow the leading ones of them: a tree."""

    token_ids: TokenArray
    branches: tuple[Branch, ...] = ()

    @classmethod
    def of(cls, paths: Iterable[TokenArray]) -> "Draft":
        """Return the tree of some drafts of the same place, likeliest first: each keeps what is new in it.

        A branch has no branches: of two drafts that leave the first one with the same token, the later is left out.
        """
        chain = as_tokens(())
        branches: dict[tuple[int, int], Branch] = {}
        for path in paths:
            depth = common_len(chain, path)
            if depth == len(chain):
                chain = path
            elif depth < len(path):
                branches.setdefault((depth, path[depth]), Branch(depth, path[depth:]))
        return cls(chain, tuple(branches.values()))


def common_len(first: Seq[int], second: Seq[int], *, begin: int = 0) -> int:
    """Return how many leading tokens are the same, of which the first `begin` are known to be."""
    shortest = min(len(first), len(second))
    return next((i for i in range(begin, shortest) if first[i] != second[i]), shortest)


class Drafter(Protocol):
    """A method of drafting. Under the coupled rule its drafts decide how fast an answer comes, never what it says.

    Engine thread only.
    """

    def prospects(self, sequence: Sequence, max_tokens: int) -> Seq[Seq[float]]:
        """Return the estimated probabilities that a draft's first token is accepted, its first two, and so on.

        They never rise; at most `max_tokens`, none where there is no draft. The first draft is the likeliest; of the
        others, which may follow in its place, the tokens that it does not have count, none likelier than those of the
        first draft at their depth.
        """
        ...

    def draft(self, wanted: Mapping[Sequence, Seq[int]]) -> Mapping[Sequence, Seq[TokenArray]]:
        """Return drafts, likeliest first, for sequences that have prospects of so many tokens of each draft."""
        ...

    def costs_s(self, num_sequences: int, num_tokens: int) -> Seq[float] | None:
        """Return the seconds of drafting 0 to `num_tokens` tokens for so many sequences; None: it takes none."""
        ...

    def observe(self, item: ScheduledSequence, result: StepResult) -> None:
        """Learn from a step that sampled for a sequence, with a draft or without."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        ...

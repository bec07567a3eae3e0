"""Prompt work that an engine has accepted and not done yet, for its load report.

Tokens that the prefix cache will probably save do not count: ten prompts that share a long prefix are little work. The
cache changes while a sequence waits, so the scheduler has one waiting sequence checked again per step.
"""

from collections.abc import Sequence as Seq

from engine.pages.block_pool import BlockPool
from engine.sequence import Sequence


def num_pairs(num_new_tokens: int, num_tokens_before: int) -> int:
    """Return the pairs of a new token and a token that it attends to, itself included."""
    return num_new_tokens * num_tokens_before + num_new_tokens * (num_new_tokens + 1) // 2


class Backlog:
    """Sums over the waiting sequences. Engine thread only; O(log blocks) per change."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._next_idx = 0
        self.num_tokens = 0
        """Tokens to compute before they can decode."""
        self.num_pairs = 0
        """Pairs of such a token and a token that it attends to."""
        self.num_context_tokens = 0
        """Tokens of the sequences that will decode here."""

    def enter(self, sequence: Sequence) -> None:
        """Count a sequence that starts to wait."""
        num_blocks = self._pool.num_usable(sequence.block_hashes, sequence.num_reusable_blocks)
        sequence.num_expected_cached_tokens = num_blocks * self._block_size
        self._count(sequence, 1)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that no longer waits."""
        self._count(sequence, -1)

    def look_again(self, waiting: Seq[Sequence]) -> None:
        """Check the cache again for one waiting sequence, each in turn."""
        if waiting:
            self._next_idx = (self._next_idx + 1) % len(waiting)
            sequence = waiting[self._next_idx]
            self.leave(sequence)
            self.enter(sequence)

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_new = sequence.num_tokens - sequence.num_expected_cached_tokens
        self.num_tokens += sign * num_new
        self.num_pairs += sign * num_pairs(num_new, sequence.num_expected_cached_tokens)
        if sequence.will_decode:
            self.num_context_tokens += sign * sequence.num_tokens

"""Description of a step for attention: a ragged batch, made once on the host."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.executor import ScheduledSequence

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """One sequence's share of a step: tokens [num_computed, num_computed + num_new_tokens)."""

    num_computed: int
    num_new_tokens: int
    block_table: Seq[int]

    @classmethod
    def of(cls, item: ScheduledSequence) -> "SequenceSpan":
        """Return a scheduled sequence's tokens and pages; valid until the sequence changes."""
        sequence = item.sequence
        return cls(
            num_computed=sequence.num_computed, num_new_tokens=item.num_new_tokens, block_table=sequence.block_table
        )

    def split(self) -> "list[SequenceSpan]":
        """Return a span for each token, over the same pages.

        Attention then computes each as the only new token of a sequence, and so with the bits that it has in a step of
        its own: sums over a chunk are ordered differently.
        """
        return [
            SequenceSpan(num_computed=position, num_new_tokens=1, block_table=self.block_table)
            for position in range(self.num_computed, self.context_len)
        ]

    @property
    def context_len(self) -> int:
        """Number of tokens with KV after the step."""
        return self.num_computed + self.num_new_tokens


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """A ragged batch: the tokens of all sequences in one row, in order. Host memory."""

    positions: Ints
    """Position of each new token in its sequence, [num_tokens]."""
    slot_mapping: Ints
    """Slot of each new token's KV, block_id * block_size + offset, all distinct, [num_tokens]."""
    query_start_loc: Ints
    """Bounds of the sequences' tokens: i owns [query_start_loc[i], query_start_loc[i + 1]), [num_seqs + 1]."""
    context_lens: Ints
    """Number of each sequence's tokens with KV after the step, [num_seqs]."""
    spans: Seq[SequenceSpan]
    block_size: int

    @cached_property
    def block_tables(self) -> tuple[Ints, ...]:
        """Copies of the block tables, [cdiv(context_len, block_size)] each, for code that needs arrays."""
        return tuple(
            np.array(s.block_table[: -(-s.context_len // self.block_size)], dtype=np.int64) for s in self.spans
        )

    @classmethod
    def from_spans(cls, spans: Seq[SequenceSpan], *, block_size: int) -> "AttentionMetadata":
        """Describe a step. Every span has a new token and a block table that covers its context. O(new tokens)."""
        if all(span.num_new_tokens == 1 for span in spans):
            positions = np.array([span.num_computed for span in spans], dtype=np.int64)
            slots = np.array([_slot(span, block_size) for span in spans], dtype=np.int64)
        else:
            positions = np.concatenate([np.arange(s.num_computed, s.context_len, dtype=np.int64) for s in spans])
            slots = np.concatenate([_slots(span, block_size) for span in spans])
        return cls(
            positions=positions,
            slot_mapping=slots,
            query_start_loc=np.cumsum([0, *(s.num_new_tokens for s in spans)], dtype=np.int64),
            context_lens=np.array([s.context_len for s in spans], dtype=np.int64),
            spans=spans,
            block_size=block_size,
        )


def _slot(span: SequenceSpan, block_size: int) -> int:
    block_idx, offset = divmod(span.num_computed, block_size)
    return span.block_table[block_idx] * block_size + offset


def _slots(span: SequenceSpan, block_size: int) -> Ints:
    first = span.num_computed // block_size
    blocks = np.array(span.block_table[first : -(-span.context_len // block_size)], dtype=np.int64)
    at = np.arange(span.num_computed, span.context_len, dtype=np.int64) - first * block_size
    return blocks[at // block_size] * block_size + at % block_size

"""What a step looks like to attention: a ragged batch, described once on the host."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """One sequence's share of a step: tokens [num_computed, num_computed + num_new_tokens)."""

    num_computed: int
    num_new_tokens: int
    block_table: Seq[int]

    @property
    def context_len(self) -> int:
        """Tokens whose KV exists after the step."""
        return self.num_computed + self.num_new_tokens


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """A ragged batch: the tokens of all sequences in one row, in order. Host memory."""

    positions: Ints
    """Of each new token in its sequence, [num_tokens]."""
    slot_mapping: Ints
    """Where each new token's KV goes, block_id * block_size + offset, all distinct, [num_tokens]."""
    query_start_loc: Ints
    """Sequence i owns tokens [query_start_loc[i], query_start_loc[i + 1]), [num_seqs + 1]."""
    context_lens: Ints
    """Tokens of each sequence whose KV exists after the step, [num_seqs]."""
    spans: Seq[SequenceSpan]
    block_size: int

    @cached_property
    def block_tables(self) -> tuple[Ints, ...]:
        """Of each sequence, a copy [cdiv(context_len, block_size)]: for those who cannot read a span's own table."""
        return tuple(
            np.array(s.block_table[: -(-s.context_len // self.block_size)], dtype=np.int64) for s in self.spans
        )

    @classmethod
    def from_spans(cls, spans: Seq[SequenceSpan], *, block_size: int) -> "AttentionMetadata":
        """Describe a step. Every span has a token and a block table that covers its context.

        The cost grows with the new tokens, not with the contexts.
        """
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

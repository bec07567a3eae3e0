"""What a step looks like to attention: a ragged batch, described once on the host."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.ids import BlockId

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """One sequence's share of a step: tokens [num_computed, num_computed + num_new_tokens)."""

    num_computed: int
    num_new_tokens: int
    block_table: Seq[BlockId]

    @property
    def context_len(self) -> int:
        """Tokens whose KV exists after the step."""
        return self.num_computed + self.num_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
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
    block_tables: tuple[Ints, ...]
    """Of each sequence, [cdiv(context_len, block_size)]."""

    @classmethod
    def from_spans(cls, spans: Seq[SequenceSpan], *, block_size: int) -> "AttentionMetadata":
        """Describe a step. Every span has a token and a block table that covers its context."""
        block_tables = tuple(
            np.asarray(s.block_table[: -(-s.context_len // block_size)], dtype=np.int64) for s in spans
        )
        positions = [np.arange(s.num_computed, s.context_len, dtype=np.int64) for s in spans]
        slots = [
            table[at // block_size] * block_size + at % block_size
            for table, at in zip(block_tables, positions, strict=True)
        ]
        return cls(
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots),
            query_start_loc=np.cumsum([0, *(s.num_new_tokens for s in spans)], dtype=np.int64),
            context_lens=np.array([s.context_len for s in spans], dtype=np.int64),
            block_tables=block_tables,
        )

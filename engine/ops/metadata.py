"""Description of a step for attention: a ragged batch, made once on the host."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

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
    mirrors: Seq[Seq[int]] = ()
    """Other block tables in which the KV of its one token is written, too."""

    @classmethod
    def of(cls, item: ScheduledSequence) -> "SequenceSpan":
        """Return a scheduled sequence's tokens and pages; valid until the sequence changes."""
        sequence = item.sequence
        return cls(
            num_computed=sequence.num_computed, num_new_tokens=item.num_new_tokens, block_table=sequence.block_table
        )

    def split(self, branches: "Seq[tuple[int, Seq[int]]]" = ()) -> "list[SequenceSpan]":
        """Return a span for each token, over the same pages.

        Attention then computes each as the only new token of a sequence, and so with the bits that it has in a step of
        its own: sums over a chunk are ordered differently. `branches`: each leaves the tokens behind the first one and
        so many others, and has a block table, in which these tokens are written, too.
        """
        return [
            SequenceSpan(
                num_computed=self.num_computed + i,
                num_new_tokens=1,
                block_table=self.block_table,
                mirrors=[table for depth, table in branches if i <= depth],
            )
            for i in range(self.num_new_tokens)
        ]

    @property
    def context_len(self) -> int:
        """Number of tokens with KV after the step."""
        return self.num_computed + self.num_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePages:
    """Pages of the states of recurrent layers in a step. A page may be the source and the target of a sequence."""

    sources: Ints
    """Page of each sequence's state before its first new token; -1: its text begins, with a state of zeros, [num_seqs].
    It may be another sequence's source, too."""
    targets: Ints
    """Page for the state behind its last new token, which is its own, [num_seqs]."""


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
    mirror_start_loc: Ints | None = None
    """Bounds of the tokens' further slots: i owns [mirror_start_loc[i], mirror_start_loc[i + 1]), [num_tokens + 1];
    None where there is no further slot at all."""
    mirror_slots: Ints | None = None
    """Further slots of new tokens' KV."""

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
        mirrors = None
        if any(span.mirrors for span in spans):  # then each has one token
            mirrors = [[_slot_in(table, span.num_computed, block_size) for table in span.mirrors] for span in spans]
        return cls(
            positions=positions,
            slot_mapping=slots,
            query_start_loc=np.cumsum([0, *(s.num_new_tokens for s in spans)], dtype=np.int64),
            context_lens=np.array([s.context_len for s in spans], dtype=np.int64),
            spans=spans,
            block_size=block_size,
            mirror_start_loc=None if mirrors is None else np.cumsum([0, *map(len, mirrors)], dtype=np.int64),
            mirror_slots=None if mirrors is None else np.array([*chain.from_iterable(mirrors)], dtype=np.int64),
        )

    def state_pages(self, window_page_of: "array[int]") -> "StatePages":
        """Return where recurrent layers find and leave the sequences' states: at the blocks of their latest tokens."""
        size, page_of = self.block_size, window_page_of
        sources = [page_of[s.block_table[(s.num_computed - 1) // size]] if s.num_computed else -1 for s in self.spans]
        targets = [page_of[s.block_table[(s.context_len - 1) // size]] for s in self.spans]
        return StatePages(sources=np.array(sources, dtype=np.int64), targets=np.array(targets, dtype=np.int64))

    def on_window_pages(self, window_page_of: "array[int]") -> "AttentionMetadata":
        """Return the step as layers with window pages see it: a block is its window page, and -1 where it has none."""
        page_of = np.frombuffer(window_page_of, dtype=np.int32)
        spans = [
            replace(span, block_table=array("i", page_of[np.asarray(span.block_table, dtype=np.int32)].tobytes()))
            for span in self.spans
        ]
        return self.from_spans(spans, block_size=self.block_size)


def _slot(span: SequenceSpan, block_size: int) -> int:
    return _slot_in(span.block_table, span.num_computed, block_size)


def _slot_in(block_table: Seq[int], position: int, block_size: int) -> int:
    block_idx, offset = divmod(position, block_size)
    return block_table[block_idx] * block_size + offset


def _slots(span: SequenceSpan, block_size: int) -> Ints:
    first = span.num_computed // block_size
    blocks = np.array(span.block_table[first : -(-span.context_len // block_size)], dtype=np.int64)
    at = np.arange(span.num_computed, span.context_len, dtype=np.int64) - first * block_size
    return blocks[at // block_size] * block_size + at % block_size

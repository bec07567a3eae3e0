"""Tensors that describe steps: block tables that stay on the device, and small inputs that are sent with each step.

    host                                   device
    block tables  ── changed entries ──▶   tables [num_rows, max_blocks], a row per sequence
    a step        ── one packed copy ──▶   words: columns of the step, of its sampling, and those entries

All inputs of a CUDA graph lie at fixed addresses: the tables, and the *arena*, into which steps of pure decode are
copied. The arena's head holds the tokens that the last step sampled, for input tokens that the host does not know yet.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.tokens import TokenArray
from engine.device.columns import Column, PackedColumns, RowMap
from engine.executor import ScheduledSequence
from engine.ops.metadata import AttentionMetadata
from engine.ops.triton_kernels.step import DeviceStep, StepColumns
from engine.sampling.device_draw import RaceColumns
from engine.sampling.logits import SamplingRow
from engine.sequence import Sequence

_NOTHING = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableUpdate:
    """Changes of the tables for one step."""

    cells: Column | None
    """Places in the flattened tables, int64; None: nothing changes."""
    block_ids: Column | None
    """New entries of these places, int32."""
    contents: dict[int, bytes]
    """Block table that each changed row will begin with, as bytes of int32."""


class BlockTables:
    """Block tables of recent sequences. Engine thread only.

    A row is compared with its sequence's whole block table, a few bytes per block, and only differences are sent to the
    device: mostly new pages. So tables may change in any way, and the row's previous owner does not matter.
    """

    def __init__(self, *, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.tables = torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device)
        self._rows: RowMap[Sequence] = RowMap(num_rows)
        self._contents: dict[int, bytes] = {}

    def assign(self, sequences: Seq[Sequence]) -> list[int]:
        """Return the rows of one step's sequences."""
        return self._rows.assign(sequences)

    def plan(self, sequences: Seq[Sequence], rows: Seq[int], columns: PackedColumns) -> TableUpdate:
        """Add the columns that `apply` needs. Changes nothing: a step may fail before `apply`."""
        max_blocks = self.tables.shape[1]
        contents: dict[int, bytes] = {}
        cells: list[int] = []
        block_ids: list[int] = []
        for row, sequence in zip(rows, sequences, strict=True):
            table = sequence.block_table.tobytes()
            known = self._contents.get(row, _NOTHING)
            if table != known:
                assert len(sequence.block_table) <= max_blocks, f"{len(sequence.block_table)} blocks, {max_blocks} fit"
                contents[row] = table
                changed = _changed(known, table)
                cells.extend(row * max_blocks + block_idx for block_idx in changed)
                block_ids.extend(sequence.block_table[block_idx] for block_idx in changed)
        return TableUpdate(
            cells=columns.ints(cells) if cells else None,
            block_ids=columns.add(np.array(block_ids, dtype=np.int32)) if cells else None,
            contents=contents,
        )

    def apply(self, update: TableUpdate, words: Tensor) -> None:
        """Launch the update, given the uploaded columns."""
        if update.cells is not None and update.block_ids is not None:
            self.tables.view(-1).index_copy_(0, update.cells.of(words), update.block_ids.of(words))
        self._contents.update(update.contents)


def _changed(known: bytes, table: bytes) -> Seq[int]:
    """Return the indices at which an int32 table differs from the known content of its row."""
    if table.startswith(known):
        return range(len(known) // 4, len(table) // 4)
    old, new = np.frombuffer(known, dtype=np.int32), np.frombuffer(table, dtype=np.int32)
    num_both = min(len(old), len(new))
    changed: list[int] = np.flatnonzero(old[:num_both] != new[:num_both]).tolist()
    return [*changed, *range(num_both, len(new))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeColumns:
    """A step in which every sequence has one token, padded to the batch size of a graph.

    They are the first columns of a step, so that for one size they always lie at the same places.
    """

    size: int
    token_ids: Column
    """Token ids that the host knows, int64."""
    token_places: Column
    """Places of the token ids in the arena: in these columns, or among those sampled last; int64."""
    table_rows: Column
    """int64."""
    positions: Column
    """int32."""
    slot_mapping: Column
    """int64; -1 for padding."""
    context_lens: Column
    """int32; 0 for padding."""
    race: RaceColumns
    num_words: int

    @classmethod
    def add(
        cls,
        batch: Seq[ScheduledSequence],
        rows: Seq[int],
        samples: Seq[SamplingRow],
        layout: "DecodeLayout",
        columns: PackedColumns,
    ) -> "DecodeColumns":
        """Add the columns of a batch of at most `layout.size` sequences, or of none, for a trial.

        They hold what `AttentionMetadata` would, without its records: this runs for every token.
        """
        known_ids: list[int] = []
        places: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for i, item in enumerate(batch):
            sequence = item.sequence
            position = sequence.num_computed
            if item.input_row is None:
                known_ids.append(sequence.token_ids[position])
                places.append(layout.head_words + i)
            else:
                known_ids.append(0)
                places.append(item.input_row)
            positions.append(position)
            block_idx, offset = divmod(position, layout.block_size)
            slots.append(sequence.block_table[block_idx] * layout.block_size + offset)

        def padded(values: Seq[int], padding: int, dtype: type[np.int64 | np.int32]) -> Column:
            column = np.full(layout.size, padding, dtype=dtype)
            column[: len(values)] = values
            return columns.add(column)

        assert columns.num_words == 0, "other columns come first"
        return cls(
            size=layout.size,
            token_ids=padded(known_ids, 0, np.int64),
            token_places=padded(places, layout.head_words, np.int64),
            table_rows=padded(rows, 0, np.int64),
            positions=padded(positions, 0, np.int32),
            slot_mapping=padded(slots, -1, np.int64),
            context_lens=padded([position + 1 for position in positions], 0, np.int32),
            race=RaceColumns.add(samples, layout.size, columns),
            num_words=columns.num_words,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Parameters of the places that `DecodeColumns` have and point to."""

    size: int
    head_words: int
    """Words of the arena before the columns, for the tokens sampled last."""
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedColumns:
    """A step of any kind: the tokens of all sequences in one row."""

    token_ids: Column
    """int64 [num_tokens]."""
    unknown: Column | None
    """Tokens whose ids are among those sampled last, int64 [num_unknown]; None: all are known."""
    unknown_rows: Column | None
    """Rows of those tokens among those sampled last, int64 [num_unknown]."""
    table_rows: Column
    max_blocks: int
    """Blocks of the longest context."""
    step: StepColumns

    @classmethod
    def add(
        cls,
        batch: Seq[ScheduledSequence],
        metadata: AttentionMetadata,
        rows: Seq[int],
        tile_tokens: int,
        columns: PackedColumns,
    ) -> "RaggedColumns":
        """Add the columns of a batch."""
        unknown = [i for i, item in enumerate(batch) if item.input_row is not None]
        return cls(
            token_ids=columns.ints(_known_token_ids(batch)),
            unknown=columns.add(metadata.query_start_loc[unknown]) if unknown else None,
            unknown_rows=columns.ints([batch[i].input_row or 0 for i in unknown]) if unknown else None,
            table_rows=columns.ints(rows),
            max_blocks=-(-int(metadata.context_lens.max()) // metadata.block_size),
            step=StepColumns.add(metadata, tile_tokens=tile_tokens, columns=columns),
        )

    def on_device(self, words: Tensor, tables: Tensor) -> DeviceStep:
        """Return the step, given the uploaded columns and the block tables of all rows."""
        return self.step.on_device(words, tables[:, : self.max_blocks].index_select(0, self.table_rows.of(words)))

    def input_ids(self, words: Tensor, last_sampled: Tensor) -> Tensor:
        """Return the token ids, int64 [num_tokens], given those sampled last, int64 [rows], none negative."""
        token_ids = self.token_ids.of(words)
        if self.unknown is not None and self.unknown_rows is not None:
            token_ids.index_copy_(0, self.unknown.of(words), last_sampled.index_select(0, self.unknown_rows.of(words)))
        return token_ids


def _known_token_ids(batch: Seq[ScheduledSequence]) -> TokenArray:
    """Return the tokens of a step, 0 for unknown ones."""
    token_ids = array("I")
    for item in batch:
        if item.input_row is not None:
            token_ids.append(0)
        else:
            begin = item.sequence.num_computed
            token_ids += item.sequence.token_ids[begin : begin + item.num_new_tokens]
    return token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SentStep:
    """A step, as the first of several ranks sends it to the others."""

    words: npt.NDArray[np.int64]
    """All of its columns."""
    update: TableUpdate
    step: DecodeColumns | RaggedColumns
    logits: tuple[Column | slice, ...] = ()
    """Rows of a ragged step's hidden states whose logits are computed, in this order; a column holds their places."""

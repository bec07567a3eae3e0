"""Description of a step for the kernels: `AttentionMetadata`, packed and on the device."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.columns import Column, PackedColumns
from engine.ops.metadata import AttentionMetadata

# Kernel parameters that point into a step. By default Triton compiles a kernel once for pointers to multiples of 16
# bytes and once for others; these may point anywhere, and no step may wait for the compiler.
STEP_POINTERS = (
    "positions_ptr",
    "slot_mapping_ptr",
    "context_lens_ptr",
    "block_tables_ptr",
    "query_start_loc_ptr",
    "decode_seqs_ptr",
    "tiles_ptr",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Two or more new tokens of a sequence, as the host knows them."""

    seq: int
    first_token: int
    """Place of the first one among the step's tokens."""
    num_tokens: int
    context_len: int
    """Number of the sequence's tokens with KV after the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """Device tensors of one step. An owner of static buffers may refill them: kernels read them when they run.

    Rows of padding cost almost nothing: a token of slot -1 writes no KV; a sequence of context length 0 reads none, and
    its attention is 0.
    """

    positions: Tensor
    """Position of each token in its sequence, int32 or int64 [num_tokens]."""
    slot_mapping: Tensor
    """Slot of each token's KV, block_id * block_size + offset, or -1, int64 [num_tokens]."""
    context_lens: Tensor
    """Number of each sequence's tokens with KV after the step, int32 [num_seqs]."""
    block_tables: Tensor
    """Pages of each sequence, int32 [num_seqs, max_blocks], of any row stride; entries beyond a context are unused."""
    query_start_loc: Tensor
    """Bounds of the sequences' tokens: i owns [query_start_loc[i], query_start_loc[i + 1]), int32 [num_seqs + 1]."""
    decode_seqs: Tensor | None
    """Sequences with one new token, int32 [num_decodes]; None: all have one, and token i belongs to sequence i."""
    prefill_tiles: Tensor | None
    """(sequence, first token inside its chunk) of each tile of queries, int32 [num_tiles, 2]; None: no chunks."""
    chunks: tuple[Chunk, ...] = ()
    """The chunks of `prefill_tiles`; refilled buffers do not change them."""

    @property
    def num_decodes(self) -> int:
        """Number of sequences with one new token."""
        return len(self.context_lens) if self.decode_seqs is None else len(self.decode_seqs)

    @classmethod
    def from_metadata(cls, metadata: AttentionMetadata, *, tile_tokens: int, device: torch.device) -> "DeviceStep":
        """Describe a step on the device, in one copy that does not wait.

        `tile_tokens` is the number of consecutive queries that share a program of the prefill kernel.
        """
        columns = PackedColumns()
        step = StepColumns.add(metadata, tile_tokens=tile_tokens, columns=columns)
        block_tables = columns.add(_pad_block_tables(metadata))
        words = columns.upload(device)
        return step.on_device(words, block_tables.of(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """A step's tensors other than its block tables, as columns; see `DeviceStep`."""

    positions: Column
    slot_mapping: Column
    context_lens: Column
    query_start_loc: Column
    decode_seqs: Column | None
    prefill_tiles: Column | None
    chunks: tuple[Chunk, ...]

    @classmethod
    def add(cls, metadata: AttentionMetadata, *, tile_tokens: int, columns: PackedColumns) -> "StepColumns":
        """Add the columns of a step."""
        is_decode = np.diff(metadata.query_start_loc) == 1
        has_chunks = not is_decode.all()
        return cls(
            positions=columns.add(metadata.positions.astype(np.int32)),
            slot_mapping=columns.add(metadata.slot_mapping),
            context_lens=columns.add(metadata.context_lens.astype(np.int32)),
            query_start_loc=columns.add(metadata.query_start_loc.astype(np.int32)),
            decode_seqs=columns.add(np.flatnonzero(is_decode).astype(np.int32)) if has_chunks else None,
            prefill_tiles=columns.add(make_prefill_tiles(metadata, tile_tokens=tile_tokens)) if has_chunks else None,
            chunks=_chunks(metadata),
        )

    def on_device(self, words: Tensor, block_tables: Tensor) -> DeviceStep:
        """Return the step, given the uploaded columns and its block tables, int32 [num_seqs, max_blocks]."""
        return DeviceStep(
            positions=self.positions.of(words),
            slot_mapping=self.slot_mapping.of(words),
            context_lens=self.context_lens.of(words),
            block_tables=block_tables,
            query_start_loc=self.query_start_loc.of(words),
            decode_seqs=None if self.decode_seqs is None else self.decode_seqs.of(words),
            prefill_tiles=None if self.prefill_tiles is None else self.prefill_tiles.of(words),
            chunks=self.chunks,
        )


def _chunks(metadata: AttentionMetadata) -> tuple[Chunk, ...]:
    begins, context_lens = metadata.query_start_loc.tolist(), metadata.context_lens.tolist()
    return tuple(
        Chunk(seq=seq, first_token=begin, num_tokens=end - begin, context_len=context_len)
        for seq, (begin, end, context_len) in enumerate(zip(begins[:-1], begins[1:], context_lens, strict=True))
        if end - begin > 1
    )


def make_prefill_tiles(metadata: AttentionMetadata, *, tile_tokens: int) -> npt.NDArray[np.int32]:
    """Cut every chunk of two or more tokens into tiles, [num_tiles, 2] of (sequence, first token inside the chunk).

    Tiles with the most keys come first: programs start in this order, and a long one must not start last.
    """
    num_new = np.diff(metadata.query_start_loc)
    chunks = np.flatnonzero(num_new > 1)
    num_tiles = -(-num_new[chunks] // tile_tokens)
    seqs = np.repeat(chunks, num_tiles)
    first_tiles = np.cumsum(num_tiles) - num_tiles
    first_tokens = (np.arange(len(seqs)) - np.repeat(first_tiles, num_tiles)) * tile_tokens
    num_keys = metadata.context_lens[seqs] - num_new[seqs] + first_tokens
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((seqs, first_tokens), axis=1)[order].astype(np.int32)


def _pad_block_tables(metadata: AttentionMetadata) -> npt.NDArray[np.int32]:
    num_blocks = -(-metadata.context_lens // metadata.block_size)
    tables = np.zeros((len(num_blocks), num_blocks.max()), dtype=np.int32)
    for row, span, used in zip(tables, metadata.spans, num_blocks.tolist(), strict=True):
        row[:used] = span.block_table[:used]
    return tables

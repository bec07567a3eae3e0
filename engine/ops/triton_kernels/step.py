"""What a step looks like to the kernels: `AttentionMetadata`, packed and on the device."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops.metadata import AttentionMetadata

# Names of the kernels' parameters that point into a step. By default Triton compiles a kernel once for pointers to
# multiples of 16 bytes and once for others; these may point anywhere, and no step must wait for a compiler.
STEP_POINTERS = (
    "positions_ptr",
    "slot_mapping_ptr",
    "context_lens_ptr",
    "block_tables_ptr",
    "query_start_loc_ptr",
    "decode_seqs_ptr",
    "tiles_ptr",
)
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """Device tensors of one step. Whoever owns static buffers may refill them: kernels read them when they run.

    Rows of padding cost next to nothing: a token of slot -1 writes no KV, a sequence of context length 0 reads none
    and its attention is 0.
    """

    positions: Tensor
    """Of each token in its sequence, int32 or int64 [num_tokens]."""
    slot_mapping: Tensor
    """Where each token's KV goes, block_id * block_size + offset, or -1, int64 [num_tokens]."""
    context_lens: Tensor
    """Tokens of each sequence whose KV exists after the step, int32 [num_seqs]."""
    block_tables: Tensor
    """int32 [num_seqs, max_blocks], rows of any stride; entries behind a context are never read."""
    query_start_loc: Tensor
    """Sequence i owns tokens [query_start_loc[i], query_start_loc[i + 1]), int32 [num_seqs + 1]."""
    decode_seqs: Tensor | None
    """Sequences with one new token, int32 [num_decodes]; None: all have one, so that token i is of sequence i."""
    prefill_tiles: Tensor | None
    """(sequence, first token inside its chunk) of each tile of queries, int32 [num_tiles, 2]; None: no chunks."""

    @property
    def num_decodes(self) -> int:
        """How many sequences have one new token."""
        return len(self.context_lens) if self.decode_seqs is None else len(self.decode_seqs)

    @classmethod
    def from_metadata(cls, metadata: AttentionMetadata, *, tile_tokens: int, device: torch.device) -> "DeviceStep":
        """Describe a step on the device, with one copy that does not wait for it.

        `tile_tokens` is how many consecutive queries share a program of the prefill kernel.
        """
        num_new = np.diff(metadata.query_start_loc)
        is_decode = num_new == 1
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "positions": metadata.positions.astype(np.int32),
            "slot_mapping": metadata.slot_mapping,
            "context_lens": metadata.context_lens.astype(np.int32),
            "block_tables": _pad_block_tables(metadata),
            "query_start_loc": metadata.query_start_loc.astype(np.int32),
        }
        if not is_decode.all():
            arrays["decode_seqs"] = np.flatnonzero(is_decode).astype(np.int32)
            arrays["prefill_tiles"] = make_prefill_tiles(metadata, tile_tokens=tile_tokens)
        tensors = _copy_packed(arrays, device)
        return cls(
            positions=tensors["positions"],
            slot_mapping=tensors["slot_mapping"],
            context_lens=tensors["context_lens"],
            block_tables=tensors["block_tables"],
            query_start_loc=tensors["query_start_loc"],
            decode_seqs=tensors.get("decode_seqs"),
            prefill_tiles=tensors.get("prefill_tiles"),
        )


def make_prefill_tiles(metadata: AttentionMetadata, *, tile_tokens: int) -> npt.NDArray[np.int32]:
    """Cut every chunk of two or more tokens into tiles, [num_tiles, 2] of (sequence, first token inside the chunk).

    Tiles with the most keys come first: programs start in this order, and a long one must not be the last to start.
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


def _copy_packed(arrays: Mapping[str, npt.NDArray[np.generic]], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays to the device in one transfer; on CUDA from pinned memory, which torch keeps until it is done."""
    offsets, num_bytes = [], 0
    for array in arrays.values():
        offsets.append(num_bytes)
        num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staging.numpy()
    for offset, array in zip(offsets, arrays.values(), strict=True):
        host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return {
        name: packed[offset : offset + array.nbytes]
        .view(torch.int64 if array.dtype.itemsize == 8 else torch.int32)
        .view(array.shape)
        for offset, (name, array) in zip(offsets, arrays.items(), strict=True)
    }

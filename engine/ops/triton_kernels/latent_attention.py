"""Attention over pages of latent rows, which are the one key of all heads, and their values but for the rotated end.

Queries were multiplied into the space of the rows (`LatentHeads`), so that no kernel makes keys or values: a program
reads a row once, for the product with the queries and for the sum. Decodes split the context among programs, as
`decode_attention` does; a tile of a chunk has some tokens and some of their heads. Memory does not grow with contexts.
"""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.device.interpreter import dot_dtype
from engine.ops.triton_kernels.key_splits import (
    KeySplits,
    combine_splits,
    make_splits,
    sequence_and_token,
    split_range,
)
from engine.ops.triton_kernels.latent_rows import LatentPages, attend_rows, load_part
from engine.ops.triton_kernels.pages import LOG2_E, Tiles
from engine.ops.triton_kernels.step import STEP_POINTERS, DeviceStep

_MIN_DOT_SIZE = 16
_CHUNK_HEADS = 16
"""Most heads of a chunk's tile."""


def _decode_tiles(dtype: torch.dtype, num_heads: int) -> Tiles:
    """Return block sizes; `rows` are heads."""
    if dtype.itemsize == 4:
        return Tiles(rows=_MIN_DOT_SIZE, keys=16, num_warps=4, num_stages=2)
    rows = min(64, max(_MIN_DOT_SIZE, triton.next_power_of_2(num_heads)))
    return Tiles(rows=rows, keys=32, num_warps=4 if rows == _MIN_DOT_SIZE else 8, num_stages=5)


def _chunk_tiles(dtype: torch.dtype) -> Tiles:
    """Return block sizes; `rows` are tokens times heads of a tile."""
    if dtype.itemsize == 4:
        return Tiles(rows=_MIN_DOT_SIZE, keys=16, num_warps=4, num_stages=2)
    return Tiles(rows=64, keys=32, num_warps=8, num_stages=5)


def _chunk_heads(num_heads: int) -> int:
    return int(min(_CHUNK_HEADS, triton.next_power_of_2(num_heads)))


def latent_tile_tokens(dtype: torch.dtype, num_heads: int) -> int:
    """Return the tokens of a tile in `DeviceStep.prefill_tiles`."""
    return _chunk_tiles(dtype).rows // _chunk_heads(num_heads)


def split_latent_keys(num_decodes: int, num_heads: int, pages: LatentPages, *, num_sms: int) -> KeySplits:
    """Choose splits for a batch of `num_decodes` on a device of `num_sms` and allocate their results."""
    tiles = _decode_tiles(pages.rows.dtype, num_heads)
    return make_splits(
        (num_decodes, num_heads, pages.rank),
        num_programs=num_decodes * triton.cdiv(num_heads, tiles.rows),
        tile_keys=tiles.keys,
        num_sms=num_sms,
        device=pages.rows.device,
    )


def decode_latent(output: Tensor, query: Tensor, pages: LatentPages, step: DeviceStep, splits: KeySplits) -> None:
    """Write the attention of each decoding sequence's token over its context into its row of `output`.

    query [num_tokens, num_heads, rank + rope_dim] and output [num_tokens, num_heads, rank] are contiguous; rows of
    other tokens are unchanged. The new token's own row is in the pages already. Also overwrites `splits`' tensors.
    """
    num_heads = query.shape[1]
    tiles = _decode_tiles(query.dtype, num_heads)
    _latent_decode_kernel[(triton.cdiv(num_heads, tiles.rows), splits.num_splits, step.num_decodes)](
        output,
        splits.outputs,
        splits.log_sums,
        query,
        pages.rows,
        step.block_tables,
        step.context_lens,
        step.query_start_loc,
        step.decode_seqs,
        pages.score_scale * LOG2_E,
        step.block_tables.stride(0),
        splits.num_splits,
        splits.min_keys,
        NUM_HEADS=num_heads,
        BLOCK_H=tiles.rows,
        **_constants(query, pages, tiles),
    )
    if splits.num_splits > 1:
        combine_splits(output, splits, step, tile_keys=tiles.keys)


def attend_latent_chunks(output: Tensor, query: Tensor, pages: LatentPages, step: DeviceStep) -> None:
    """Write the attention of the tokens of `step.prefill_tiles` over their contexts into their rows of `output`.

    Tensors are those of `decode_latent`; a tile has `latent_tile_tokens(...)` tokens.
    """
    if step.prefill_tiles is None:
        return
    num_heads = query.shape[1]
    tiles, block_heads = _chunk_tiles(query.dtype), _chunk_heads(num_heads)
    _latent_chunk_kernel[(len(step.prefill_tiles), triton.cdiv(num_heads, block_heads))](
        output,
        query,
        pages.rows,
        step.block_tables,
        step.context_lens,
        step.query_start_loc,
        step.prefill_tiles,
        pages.score_scale * LOG2_E,
        step.block_tables.stride(0),
        NUM_HEADS=num_heads,
        BLOCK_H=block_heads,
        BLOCK_M=tiles.rows,
        **_constants(query, pages, tiles),
    )


def _constants(query: Tensor, pages: LatentPages, tiles: Tiles) -> dict[str, object]:
    return {
        "RANK": pages.rank,
        "ROPE_DIM": pages.rope_dim,
        "PAGE_SIZE": pages.block_size,
        "PAGE_SLOTS": pages.page_slots,
        "BLOCK_R": max(_MIN_DOT_SIZE, triton.next_power_of_2(pages.rank)),
        "BLOCK_P": max(_MIN_DOT_SIZE, triton.next_power_of_2(pages.rope_dim)),
        "BLOCK_N": tiles.keys,
        "DOT_DTYPE": dot_dtype(query.dtype),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "min_keys"], do_not_specialize_on_alignment=list(STEP_POINTERS)
)
def _latent_decode_kernel(
    output_ptr,
    split_outputs_ptr,
    split_log_sums_ptr,
    query_ptr,
    rows_ptr,
    block_tables_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    decode_seqs_ptr,
    qk_scale,
    table_stride,
    num_splits,
    min_keys,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    split = tl.program_id(1)
    index = tl.program_id(2)
    seq, token = sequence_and_token(index, query_start_loc_ptr, decode_seqs_ptr)
    context_len = tl.load(context_lens_ptr + seq)
    _, split_size, num_used = split_range(context_len, num_splits, min_keys, 0, BLOCK_N)
    if split >= tl.maximum(num_used, 1):
        return
    begin = split * split_size
    end = tl.minimum(begin + split_size, context_len)

    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    has_head = heads < NUM_HEADS
    offsets = token.to(tl.int64) * NUM_HEADS + heads
    start = query_ptr + offsets[:, None] * (RANK + ROPE_DIM)
    query = load_part(start, has_head, RANK, BLOCK_R).to(DOT_DTYPE)
    rope_query = load_part(start + RANK, has_head, ROPE_DIM, BLOCK_P).to(DOT_DTYPE)
    state = (
        tl.zeros([BLOCK_H, BLOCK_R], dtype=tl.float32),
        tl.full([BLOCK_H], float("-inf"), dtype=tl.float32),
        tl.zeros([BLOCK_H], dtype=tl.float32),
    )
    acc, row_max, row_sum = attend_rows(
        state,
        query,
        rope_query,
        tl.zeros([BLOCK_H], dtype=tl.int32) + (end - 1),
        rows_ptr,
        block_tables_ptr + seq.to(tl.int64) * table_stride,
        begin,
        end,
        qk_scale,
        RANK=RANK,
        ROPE_DIM=ROPE_DIM,
        PAGE_SIZE=PAGE_SIZE,
        PAGE_SLOTS=PAGE_SLOTS,
        BLOCK_R=BLOCK_R,
        BLOCK_P=BLOCK_P,
        BLOCK_N=BLOCK_N,
        DOT_DTYPE=DOT_DTYPE,
    )
    dims = tl.arange(0, BLOCK_R)
    stored = has_head[:, None] & (dims < RANK)[None, :]
    # A context without rows sums to 0 and reads zeros.
    result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if num_used <= 1:
        at = output_ptr + offsets[:, None] * RANK + dims[None, :]
        tl.store(at, result.to(output_ptr.dtype.element_ty), mask=stored)
    else:
        partial = (index.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(split_log_sums_ptr + partial, row_max + tl.log2(row_sum), mask=has_head)
        tl.store(split_outputs_ptr + partial[:, None] * RANK + dims[None, :], result, mask=stored)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=list(STEP_POINTERS))
def _latent_chunk_kernel(
    output_ptr,
    query_ptr,
    rows_ptr,
    block_tables_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    tiles_ptr,
    qk_scale,
    table_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = BLOCK_M // BLOCK_H
    tile = tl.program_id(0)
    seq = tl.load(tiles_ptr + 2 * tile)
    first_token = tl.load(tiles_ptr + 2 * tile + 1)
    query_begin = tl.load(query_start_loc_ptr + seq)
    num_new = tl.load(query_start_loc_ptr + seq + 1) - query_begin
    num_computed = tl.load(context_lens_ptr + seq) - num_new

    at = tl.arange(0, BLOCK_M)
    tokens = first_token + at // BLOCK_H  # in the chunk
    heads = tl.program_id(1) * BLOCK_H + at % BLOCK_H
    exists = (tokens < num_new) & (heads < NUM_HEADS)
    offsets = (query_begin + tokens).to(tl.int64) * NUM_HEADS + heads
    start = query_ptr + offsets[:, None] * (RANK + ROPE_DIM)
    query = load_part(start, exists, RANK, BLOCK_R).to(DOT_DTYPE)
    rope_query = load_part(start + RANK, exists, ROPE_DIM, BLOCK_P).to(DOT_DTYPE)

    end = num_computed + tl.minimum(first_token + TILE_TOKENS, num_new)
    state = (
        tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32),
        tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
        tl.zeros([BLOCK_M], dtype=tl.float32),
    )
    # One loop with a mask: another one without, for the rows that all see, would take more registers than there are.
    acc, _row_max, row_sum = attend_rows(
        state,
        query,
        rope_query,
        tl.minimum(num_computed + tokens, end - 1),
        rows_ptr,
        block_tables_ptr + seq.to(tl.int64) * table_stride,
        0,
        end,
        qk_scale,
        RANK=RANK,
        ROPE_DIM=ROPE_DIM,
        PAGE_SIZE=PAGE_SIZE,
        PAGE_SLOTS=PAGE_SLOTS,
        BLOCK_R=BLOCK_R,
        BLOCK_P=BLOCK_P,
        BLOCK_N=BLOCK_N,
        DOT_DTYPE=DOT_DTYPE,
    )
    dims = tl.arange(0, BLOCK_R)
    target = output_ptr + offsets[:, None] * RANK + dims[None, :]
    result = (acc / row_sum[:, None]).to(output_ptr.dtype.element_ty)
    tl.store(target, result, mask=exists[:, None] & (dims < RANK)[None, :])

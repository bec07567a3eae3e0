"""Causal attention of chunks of new tokens, over their sequences' pages.

The chunk's own keys are in the pages already, so that a cached prefix and the chunk are one run of keys in one block
table. A program takes a tile of consecutive tokens, with all query heads that share a key head (FlashAttention-2, one
pass over the keys): first the keys that every row of the tile sees, without a mask, then the rest.
"""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.device.interpreter import dot_dtype
from engine.ops.triton_kernels.pages import LOG2_E, LayerPages, Tiles, attend_keys, sink_weights
from engine.ops.triton_kernels.step import STEP_POINTERS, DeviceStep


def prefill_tiles(query_dtype: torch.dtype, head_dim: int) -> Tiles:
    """Return block sizes; 128 rows are two warp groups of Hopper's tensor cores."""
    if query_dtype.itemsize == 4:
        return Tiles(rows=32, keys=16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tiles(rows=64, keys=32, num_warps=8, num_stages=3)
    return Tiles(rows=128, keys=64 if head_dim > 64 else 128, num_warps=8, num_stages=5)


def tile_tokens(query_dtype: torch.dtype, head_dim: int, group: int) -> int:
    """Return how many tokens a program takes when `group` query heads share a key head."""
    rows = prefill_tiles(query_dtype, head_dim).rows
    if group > rows:
        raise ValueError(f"{group} query heads share a key head; the prefill kernel takes at most {rows}")
    return rows // group


def prefill_attention(
    output: Tensor, query: Tensor, pages: LayerPages, step: DeviceStep, sinks: Tensor | None = None
) -> None:
    """Write the attention of the tokens of `step.prefill_tiles` over their contexts into their rows of `output`.

    output and query are contiguous [num_tokens, num_heads, head_dim]; rows of other tokens are unchanged. A tile has
    `tile_tokens(...)` tokens. sinks [num_heads]: see `StepOps.attend`.
    """
    if step.prefill_tiles is None:
        return
    num_heads, head_dim = query.shape[1:]
    tiles = prefill_tiles(query.dtype, head_dim)
    _prefill_kernel[(len(step.prefill_tiles) * pages.num_kv_heads,)](
        output,
        query,
        pages.keys,
        pages.values,
        step.block_tables,
        step.context_lens,
        step.query_start_loc,
        step.prefill_tiles,
        sinks,
        pages.score_scale * LOG2_E,
        pages.value_scale,
        step.block_tables.stride(0),
        NUM_KV_HEADS=pages.num_kv_heads,
        GROUP=num_heads // pages.num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=pages.block_size,
        PAGE_SLOTS=pages.page_slots,
        WINDOW=pages.window or 0,
        BLOCK_M=tiles.rows,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=tiles.keys,
        DOT_DTYPE=dot_dtype(query.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=list(STEP_POINTERS))
def _prefill_kernel(
    output_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    block_tables_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    tiles_ptr,
    sinks_ptr,
    qk_scale,
    value_scale,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    seq = tl.load(tiles_ptr + 2 * tile)
    first_token = tl.load(tiles_ptr + 2 * tile + 1)
    query_begin = tl.load(query_start_loc_ptr + seq)
    num_new = tl.load(query_start_loc_ptr + seq + 1) - query_begin
    num_computed = tl.load(context_lens_ptr + seq) - num_new

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP  # in the chunk
    heads = kv_head * GROUP + rows % GROUP
    stored = ((rows < TILE_TOKENS * GROUP) & (tokens < num_new))[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (query_begin + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    offsets = offsets[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(query_ptr + offsets, mask=stored, other=0.0).to(DOT_DTYPE)

    # Keys visible to: [oldest, edge) some rows, by window · [edge, full) all rows · [full, end) some rows, by causality
    first_position = num_computed + first_token
    end = num_computed + tl.minimum(first_token + TILE_TOKENS, num_new)
    positions = tl.minimum(num_computed + tokens, end - 1)
    full = (first_position + 1) // BLOCK_N * BLOCK_N
    oldest = 0
    edge = oldest
    if WINDOW > 0:
        oldest = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        edge = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
        edge = tl.minimum(edge, full)
    state = (
        tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32),
        tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
        tl.zeros([BLOCK_M], dtype=tl.float32),
    )
    bounds = (oldest, edge, full, end)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        state = attend_keys(
            state,
            query,
            positions,
            keys_ptr + kv_head * HEAD_DIM,
            values_ptr + kv_head * HEAD_DIM,
            block_tables_ptr + seq.to(tl.int64) * table_stride,
            bounds[part],
            bounds[part + 1],
            qk_scale,
            NUM_KV_HEADS * HEAD_DIM,
            HEAD_DIM=HEAD_DIM,
            PAGE_SIZE=PAGE_SIZE,
            PAGE_SLOTS=PAGE_SLOTS,
            WINDOW=WINDOW,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
            MASKED=part != 1,
            DOT_DTYPE=DOT_DTYPE,
        )
    acc, row_max, row_sum = state
    if sinks_ptr is not None:
        row_sum += sink_weights(sinks_ptr, heads, NUM_KV_HEADS * GROUP, row_max)
    result = acc * (value_scale / row_sum)[:, None]
    tl.store(output_ptr + offsets, result.to(output_ptr.dtype.element_ty), mask=stored)

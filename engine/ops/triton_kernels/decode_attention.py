"""Attention of sequences that have one new token, over their pages.

A sequence's keys are split among programs, whose results a second kernel combines (`key_splits`). Query heads that
share a key head are the rows of one matrix product, so that no key is read twice.
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
from engine.ops.triton_kernels.pages import LOG2_E, LayerPages, Tiles, attend_keys, sink_weights
from engine.ops.triton_kernels.step import STEP_POINTERS, DeviceStep


def decode_tiles(page_dtype: torch.dtype, head_dim: int) -> Tiles:
    """Return block sizes that keep three programs on a multiprocessor, each loading two tiles of keys ahead.

    Half of the stages are for the block table, whose entries must arrive before the tile that they point to.
    """
    if page_dtype.itemsize == 4:
        return Tiles(keys=32, num_warps=4, num_stages=3)
    if page_dtype.itemsize == 1:  # widened in registers, of which a tile of 64 keys leaves too few in Triton 3.6
        return Tiles(keys=128 if head_dim <= 64 else 32, num_warps=4, num_stages=7)
    return Tiles(keys=128 if head_dim <= 64 else 64 if head_dim <= 128 else 32, num_warps=4, num_stages=5)


def split_keys(num_decodes: int, num_heads: int, pages: LayerPages, *, num_sms: int) -> KeySplits:
    """Choose splits for a batch of `num_decodes` on a device of `num_sms` and allocate their results."""
    return make_splits(
        (num_decodes, num_heads, pages.head_dim),
        num_programs=num_decodes * pages.num_kv_heads,
        tile_keys=decode_tiles(pages.keys.dtype, pages.head_dim).keys,
        num_sms=num_sms,
        device=pages.keys.device,
    )


def decode_attention(
    output: Tensor,
    query: Tensor,
    pages: LayerPages,
    step: DeviceStep,
    splits: KeySplits,
    sinks: Tensor | None = None,
) -> None:
    """Write the attention of each decoding sequence's token over its context into its row of `output`.

    output and query are contiguous [num_tokens, num_heads, head_dim]; rows of other tokens are unchanged. The new
    token's own key and value are in the pages already. sinks [num_heads]: see `StepOps.attend`. Also overwrites
    `splits`' tensors.
    """
    num_heads, head_dim = query.shape[1:]
    group = num_heads // pages.num_kv_heads
    tiles = decode_tiles(pages.keys.dtype, head_dim)
    _decode_kernel[(pages.num_kv_heads, splits.num_splits, step.num_decodes)](
        output,
        splits.outputs,
        splits.log_sums,
        query,
        pages.keys,
        pages.values,
        step.block_tables,
        step.context_lens,
        step.query_start_loc,
        step.decode_seqs,
        sinks,
        pages.score_scale * LOG2_E,
        pages.value_scale,
        step.block_tables.stride(0),
        splits.num_splits,
        splits.min_keys,
        NUM_KV_HEADS=pages.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=pages.block_size,
        PAGE_SLOTS=pages.page_slots,
        WINDOW=pages.window or 0,
        BLOCK_H=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=tiles.keys,
        DOT_DTYPE=dot_dtype(query.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits.num_splits > 1:
        combine_splits(output, splits, step, sinks, tile_keys=tiles.keys, window=pages.window)


@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "min_keys"], do_not_specialize_on_alignment=list(STEP_POINTERS)
)
def _decode_kernel(
    output_ptr,
    split_outputs_ptr,
    split_log_sums_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    block_tables_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    decode_seqs_ptr,
    sinks_ptr,
    qk_scale,
    value_scale,
    table_stride,
    num_splits,
    min_keys,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    index = tl.program_id(2)
    seq, token = sequence_and_token(index, query_start_loc_ptr, decode_seqs_ptr)
    context_len = tl.load(context_lens_ptr + seq)
    begin, split_size, num_used = split_range(context_len, num_splits, min_keys, WINDOW, BLOCK_N)
    if split >= tl.maximum(num_used, 1):
        return
    begin += split * split_size
    end = tl.minimum(begin + split_size, context_len)

    rows = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    stored = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    query = tl.load(query_ptr + offsets, mask=stored, other=0.0).to(DOT_DTYPE)
    state = (
        tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32),
        tl.full([BLOCK_H], float("-inf"), dtype=tl.float32),
        tl.zeros([BLOCK_H], dtype=tl.float32),
    )
    acc, row_max, row_sum = attend_keys(
        state,
        query,
        tl.zeros([BLOCK_H], dtype=tl.int32) + (end - 1),
        keys_ptr + kv_head * HEAD_DIM,
        values_ptr + kv_head * HEAD_DIM,
        block_tables_ptr + seq.to(tl.int64) * table_stride,
        begin,
        end,
        qk_scale,
        NUM_KV_HEADS * HEAD_DIM,
        HEAD_DIM=HEAD_DIM,
        PAGE_SIZE=PAGE_SIZE,
        PAGE_SLOTS=PAGE_SLOTS,
        WINDOW=0,  # `begin` is where the window starts
        BLOCK_D=BLOCK_D,
        BLOCK_N=BLOCK_N,
        MASKED=True,
        DOT_DTYPE=DOT_DTYPE,
    )
    if sinks_ptr is not None:  # of several splits, the combining kernel
        weights = sink_weights(sinks_ptr, heads, NUM_KV_HEADS * GROUP, row_max)
        row_sum += tl.where(num_used <= 1, weights, 0.0)
    # A context without keys sums to 0 and reads zeros.
    result = acc * (value_scale / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
    if num_used <= 1:
        tl.store(output_ptr + offsets, result.to(output_ptr.dtype.element_ty), mask=stored)
    else:
        partial = (index.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * num_splits + split
        tl.store(split_log_sums_ptr + partial, row_max + tl.log2(row_sum), mask=rows < GROUP)
        tl.store(split_outputs_ptr + partial[:, None] * HEAD_DIM + dims[None, :], result, mask=stored)

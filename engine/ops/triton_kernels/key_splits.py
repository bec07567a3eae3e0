"""Contexts that are split among programs (Flash-Decoding): how many ways, and their results, which a kernel combines.

The grid depends only on the number of sequences. The device splits keys by context length, and programs without work
exit at once: the same launch, captured in a CUDA graph, serves contexts of any length.
"""
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.triton_kernels.pages import sink_weights
from engine.ops.triton_kernels.step import STEP_POINTERS, DeviceStep

MAX_SPLITS = 64
_PROGRAMS_PER_SM = 4
"""Two to three run at a time; the next wave evens out contexts of different lengths."""
_MIN_SPLITS_OF_LARGE_BATCH = 4
"""So that one long context among many short ones is not read by a single program per head."""
_MIN_KEYS_OF_LARGE_BATCH = 512
"""When the batch fills the device by itself, smaller splits cost more in partial results than they gain."""
_COMBINED_AT_ONCE = tl.constexpr(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySplits:
    """Division of a sequence's keys among programs, and their partial results. Reused by every layer."""

    num_splits: int
    min_keys: int
    """Minimum number of keys of a split, unless the context is shorter."""
    outputs: Tensor
    """Softmax-weighted values of each split, float32 [num_decodes, num_heads, num_splits, head_dim]."""
    log_sums: Tensor
    """log2 of each split's sum of exponentials, float32 [num_decodes, num_heads, num_splits]."""


def make_splits(
    sizes: tuple[int, int, int], *, num_programs: int, tile_keys: int, num_sms: int, device: torch.device
) -> KeySplits:
    """Choose splits for results of `sizes` = (num_decodes, num_heads, head_dim), and allocate these.

    `num_programs`: those of the batch if no context were split.
    """
    num_decodes, num_heads, head_dim = sizes
    wanted = -(-_PROGRAMS_PER_SM * num_sms // max(num_programs, 1))
    if num_programs >= num_sms:
        num_splits, min_keys = max(wanted, _MIN_SPLITS_OF_LARGE_BATCH), _MIN_KEYS_OF_LARGE_BATCH
    else:
        num_splits, min_keys = min(wanted, MAX_SPLITS), tile_keys
    return KeySplits(
        num_splits=num_splits,
        min_keys=min_keys,
        outputs=torch.empty((num_decodes, num_heads, num_splits, head_dim), dtype=torch.float32, device=device),
        log_sums=torch.empty((num_decodes, num_heads, num_splits), dtype=torch.float32, device=device),
    )


def combine_splits(
    output: Tensor,
    splits: KeySplits,
    step: DeviceStep,
    sinks: Tensor | None = None,
    *,
    tile_keys: int,
    window: int | None = None,
) -> None:
    """Write the results of contexts that were split into rows of `output`, [num_tokens, num_heads, head_dim].

    `tile_keys`: keys of a tile of the kernel that has filled the splits.
    """
    num_heads, head_dim = output.shape[1:]
    _combine_kernel[(num_heads, step.num_decodes)](
        output,
        splits.outputs,
        splits.log_sums,
        step.context_lens,
        step.query_start_loc,
        step.decode_seqs,
        sinks,
        splits.num_splits,
        splits.min_keys,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        WINDOW=window or 0,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_N=tile_keys,
        BLOCK_S=MAX_SPLITS,
        num_warps=4,
    )


@triton.jit
def split_range(context_len, num_splits, min_keys, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first key inside the window, keys per split, and the number of non-empty splits, for all kernels."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context_len - WINDOW, 0)
    num_keys = context_len - begin
    split_size = tl.maximum(min_keys, tl.cdiv(num_keys, num_splits))
    split_size = tl.cdiv(split_size, BLOCK_N) * BLOCK_N
    return begin, split_size, tl.cdiv(num_keys, split_size)


@triton.jit
def sequence_and_token(index, query_start_loc_ptr, decode_seqs_ptr):
    """Return the sequence of the index-th decode, and the row of its token."""
    if decode_seqs_ptr is None:
        return index, index
    else:  # noqa: RET505 - Triton compiles one of the two
        seq = tl.load(decode_seqs_ptr + index)
        return seq, tl.load(query_start_loc_ptr + seq)


@triton.jit(do_not_specialize=["num_splits", "min_keys"], do_not_specialize_on_alignment=list(STEP_POINTERS))
def _combine_kernel(
    output_ptr,
    split_outputs_ptr,
    split_log_sums_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    decode_seqs_ptr,
    sinks_ptr,
    num_splits,
    min_keys,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Weigh the splits of one sequence and head by their sums of exponentials."""
    head = tl.program_id(0)
    index = tl.program_id(1)
    seq, token = sequence_and_token(index, query_start_loc_ptr, decode_seqs_ptr)
    _, _, num_used = split_range(tl.load(context_lens_ptr + seq), num_splits, min_keys, WINDOW, BLOCK_N)
    if num_used <= 1:
        return  # written already
    first = (index.to(tl.int64) * NUM_HEADS + head) * num_splits
    all_splits = tl.arange(0, BLOCK_S)
    all_log_sums = tl.load(split_log_sums_ptr + first + all_splits, mask=all_splits < num_used, other=float("-inf"))
    log_max = tl.max(all_log_sums, 0)
    total = tl.sum(tl.exp2(all_log_sums - log_max), 0)
    if sinks_ptr is not None:
        total += sink_weights(sinks_ptr, head, NUM_HEADS, log_max)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for first_split in range(0, num_used, _COMBINED_AT_ONCE):
        splits = first_split + tl.arange(0, _COMBINED_AT_ONCE)
        exists = splits < num_used
        log_sums = tl.load(split_log_sums_ptr + first + splits, mask=exists, other=float("-inf"))
        outputs = tl.load(
            split_outputs_ptr + (first + splits)[:, None] * HEAD_DIM + dims[None, :],
            mask=exists[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(outputs * tl.exp2(log_sums - log_max)[:, None], 0)
    offsets = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(output_ptr + offsets, (acc / total).to(output_ptr.dtype.element_ty), mask=dims < HEAD_DIM)

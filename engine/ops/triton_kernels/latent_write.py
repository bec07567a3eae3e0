"""The work between projection and latent attention in one pass: rotation of queries, and a row into the pages."""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.triton_kernels.latent_rows import LatentPages
from engine.ops.triton_kernels.step import STEP_POINTERS, DeviceStep

_BLOCK_HEADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRotation:
    """How a layer's rows, and the ends of its queries, are made."""

    norm: Tensor
    """Weight of the norm of a row's first values, [rank]."""
    eps: float
    angles: Tensor
    """`rotation_table` of rope_dim that covers every position."""
    has_interleaved_pairs: bool
    """See `LatentConfig`."""


def latent_write(query: Tensor, row: Tensor, by: LatentRotation, pages: LatentPages, step: DeviceStep) -> Tensor:
    """Return the rotated ends of the queries, [num_tokens, num_heads, rope_dim]; write rows to the pages.

    query [num_tokens, num_heads, query_dim] and row [num_tokens, rank + rope_dim], as projected, have any token stride.
    Tokens of slot -1 write nothing. Computes in float32. Mutates the pages.
    """
    num_tokens, num_heads, query_dim = query.shape
    rope_dim = pages.rope_dim
    rotated = torch.empty((num_tokens, num_heads, rope_dim), dtype=query.dtype, device=query.device)
    _latent_write_kernel[(num_tokens, 1 + triton.cdiv(num_heads, _BLOCK_HEADS))](
        rotated,
        pages.rows,
        query,
        row,
        by.norm,
        step.positions,
        step.slot_mapping,
        by.angles,
        by.eps,
        query.stride(0),
        row.stride(0),
        NUM_HEADS=num_heads,
        QUERY_DIM=query_dim,
        ROPE_DIM=rope_dim,
        RANK=pages.rank,
        PAGE_SIZE=pages.block_size,
        PAGE_SLOTS=pages.page_slots,
        IS_INTERLEAVED=by.has_interleaved_pairs,
        BLOCK_RANK=triton.next_power_of_2(pages.rank),
        BLOCK_PAIRS=triton.next_power_of_2(rope_dim // 2),
        BLOCK_HEADS=_BLOCK_HEADS,
        num_warps=4,
    )
    return rotated


@triton.jit(do_not_specialize_on_alignment=list(STEP_POINTERS))
def _latent_write_kernel(
    rotated_ptr,
    pages_ptr,
    query_ptr,
    row_ptr,
    norm_ptr,
    positions_ptr,
    slot_mapping_ptr,
    angles_ptr,
    eps,
    query_stride,
    row_stride,
    NUM_HEADS: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK_PAIRS)
    has_pair = pairs < ROPE_DIM // 2
    angles_ptr += tl.load(positions_ptr + token).to(tl.int64) * ROPE_DIM + pairs
    cos = tl.load(angles_ptr, mask=has_pair, other=0.0)[None, :]
    sin = tl.load(angles_ptr + ROPE_DIM // 2, mask=has_pair, other=0.0)[None, :]
    if tl.program_id(1) == 0:
        slot = tl.load(slot_mapping_ptr + token)
        source = row_ptr + token * row_stride
        target = pages_ptr + (slot // PAGE_SIZE * PAGE_SLOTS + slot % PAGE_SIZE) * (RANK + ROPE_DIM)
        _norm(target, source, norm_ptr, eps, slot >= 0, RANK, BLOCK_RANK)
        exists = has_pair[None, :] & (slot >= 0)
        _rotate(target + RANK, source + RANK, pairs[None, :], exists, cos, sin, ROPE_DIM, IS_INTERLEAVED)
    else:
        heads = ((tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        _rotate(
            rotated_ptr + (token * NUM_HEADS + heads) * ROPE_DIM,
            query_ptr + token * query_stride + heads * QUERY_DIM + (QUERY_DIM - ROPE_DIM),
            pairs[None, :],
            (heads < NUM_HEADS) & has_pair[None, :],
            cos,
            sin,
            ROPE_DIM,
            IS_INTERLEAVED,
        )


@triton.jit
def _norm(target_ptr, source_ptr, weight_ptr, eps, is_stored, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr):
    values = tl.arange(0, BLOCK_RANK)
    exists = values < RANK
    dtype = target_ptr.dtype.element_ty
    x = tl.load(source_ptr + values, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + values, mask=exists, other=0.0).to(tl.float32)
    # Rounded before the weight too, as `rms_norm` does.
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)).to(dtype).to(tl.float32) * weight
    tl.store(target_ptr + values, normed.to(dtype), mask=exists & is_stored)


@triton.jit
def _rotate(target_ptrs, source_ptrs, pairs, exists, cos, sin, ROPE_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Rotate pairs, which lie half of ROPE_DIM apart afterwards."""
    HALF: tl.constexpr = ROPE_DIM // 2
    if IS_INTERLEAVED:
        first = tl.load(source_ptrs + 2 * pairs, mask=exists, other=0.0).to(tl.float32)
        second = tl.load(source_ptrs + 2 * pairs + 1, mask=exists, other=0.0).to(tl.float32)
    else:
        first = tl.load(source_ptrs + pairs, mask=exists, other=0.0).to(tl.float32)
        second = tl.load(source_ptrs + HALF + pairs, mask=exists, other=0.0).to(tl.float32)
    dtype = target_ptrs.dtype.element_ty
    tl.store(target_ptrs + pairs, (first * cos - second * sin).to(dtype), mask=exists)
    tl.store(target_ptrs + HALF + pairs, (second * cos + first * sin).to(dtype), mask=exists)

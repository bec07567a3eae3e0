"""The work between projection and attention in one pass: head norms, rotation, and the write to the pages."""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.step import STEP_POINTERS, DeviceStep
from engine.weights.rope import RotaryEmbedding

_FLOAT8_MAX = tl.constexpr(448.0)
_MANY_TOKENS = 64
"""Number of tokens from which on each program takes many heads, since there are enough programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Root-mean-square norms of query and key heads."""

    query: Tensor
    """[head_dim]."""
    key: Tensor
    """[head_dim]."""
    eps: float


def rotation_table(rope: RotaryEmbedding, num_positions: int, *, device: torch.device) -> Tensor:
    """Return the cosines, then the sines, of each position's angles, float32 [num_positions, head_dim]."""
    return torch.cat(rope.half_angles(torch.arange(num_positions, device=device)), dim=-1)


def rope_kv_write(
    qkv: Tensor, norms: HeadNorms | None, rotations: Tensor, pages: LayerPages, step: DeviceStep
) -> Tensor:
    """Return the queries, normalised and rotated, [num_tokens, num_heads, head_dim]; write keys and values to pages.

    qkv is contiguous [num_tokens, num_heads + 2 * num_kv_heads, head_dim], as projected; `rotations` is a
    `rotation_table` that covers every position. Keys are normalised and rotated too; keys and values are divided by the
    pages' scales and cast. Tokens of slot -1 write nothing. Computes in float32.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_heads = num_all_heads - 2 * pages.num_kv_heads
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_heads = 4 if num_tokens < _MANY_TOKENS else 16
    _rope_kv_write_kernel[(num_tokens, triton.cdiv(num_all_heads, block_heads))](
        query,
        pages.keys,
        pages.values,
        qkv,
        step.positions,
        step.slot_mapping,
        rotations,
        norms.query if norms else None,
        norms.key if norms else None,
        norms.eps if norms else 0.0,
        1.0 / pages.key_scale,
        1.0 / pages.value_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=pages.num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=pages.block_size,
        PAGE_SLOTS=pages.page_slots,
        BLOCK_PAIRS=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads,
        IS_FLOAT8=pages.keys.dtype == torch.float8_e4m3fn,
        num_warps=4 if block_heads == 16 else 2,
    )
    return query


@triton.jit(do_not_specialize_on_alignment=list(STEP_POINTERS))
def _rope_kv_write_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    qkv_ptr,
    positions_ptr,
    slot_mapping_ptr,
    rotations_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    key_factor,
    value_factor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, BLOCK_PAIRS)
    has_pair = pairs < HALF
    exists = (heads < ALL_HEADS)[:, None] & has_pair[None, :]
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    source = qkv_ptr + (token * ALL_HEADS + heads[:, None]) * HEAD_DIM + pairs[None, :]
    first = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=exists, other=0.0).to(tl.float32)

    normed_first, normed_second = first, second
    if query_norm_ptr is not None:
        mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM
        scale = tl.rsqrt(mean_square + eps)[:, None]
        query_first = tl.load(query_norm_ptr + pairs, mask=has_pair, other=0.0).to(tl.float32)
        query_second = tl.load(query_norm_ptr + HALF + pairs, mask=has_pair, other=0.0).to(tl.float32)
        key_first = tl.load(key_norm_ptr + pairs, mask=has_pair, other=0.0).to(tl.float32)
        key_second = tl.load(key_norm_ptr + HALF + pairs, mask=has_pair, other=0.0).to(tl.float32)
        normed_first = first * scale * tl.where(is_query, query_first[None, :], key_first[None, :])
        normed_second = second * scale * tl.where(is_query, query_second[None, :], key_second[None, :])
    angles_ptr = rotations_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + pairs
    cos = tl.load(angles_ptr, mask=has_pair, other=0.0)[None, :]
    sin = tl.load(angles_ptr + HALF, mask=has_pair, other=0.0)[None, :]
    first = tl.where(is_value, first, normed_first * cos - normed_second * sin)
    second = tl.where(is_value, second, normed_second * cos + normed_first * sin)

    target = query_ptr + (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + pairs[None, :]
    tl.store(target, first.to(query_ptr.dtype.element_ty), mask=exists & is_query)
    tl.store(target + HALF, second.to(query_ptr.dtype.element_ty), mask=exists & is_query)
    slot = tl.load(slot_mapping_ptr + token)
    stored = exists & (slot >= 0)
    factor = tl.where(is_value, value_factor, key_factor)
    first *= factor
    second *= factor
    if IS_FLOAT8:  # casting a value out of range would give NaN
        first = tl.minimum(tl.maximum(first, -_FLOAT8_MAX), _FLOAT8_MAX)
        second = tl.minimum(tl.maximum(second, -_FLOAT8_MAX), _FLOAT8_MAX)
    first = first.to(keys_ptr.dtype.element_ty)
    second = second.to(keys_ptr.dtype.element_ty)
    slot = slot // PAGE_SIZE * PAGE_SLOTS + slot % PAGE_SIZE
    key_heads = (heads - NUM_HEADS)[:, None]
    target = keys_ptr + (slot * NUM_KV_HEADS + key_heads) * HEAD_DIM + pairs[None, :]
    tl.store(target, first, mask=stored & (key_heads >= 0) & (key_heads < NUM_KV_HEADS))
    tl.store(target + HALF, second, mask=stored & (key_heads >= 0) & (key_heads < NUM_KV_HEADS))
    value_heads = key_heads - NUM_KV_HEADS
    target = values_ptr + (slot * NUM_KV_HEADS + value_heads) * HEAD_DIM + pairs[None, :]
    tl.store(target, first, mask=stored & is_value)
    tl.store(target + HALF, second, mask=stored & is_value)

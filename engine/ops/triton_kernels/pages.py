"""One layer's pages, and the loop over keys through a block table that both attention kernels share."""
# ruff: noqa: ANN001, ANN201, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
"""Factor to base 2, in which softmax is computed, since the hardware's exponential has it."""

_LOG2_E = tl.constexpr(LOG2_E)

# Finite, so that (hidden - hidden) is 0 and not NaN. A row whose first keys are all hidden sums them with weight 1
# until its first visible key, which then scales the sum by exp2(HIDDEN - m) = 0.
HIDDEN = tl.constexpr(-1.0e30)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim], alike in memory.

    A page is contiguous; the pages of a layer lie apart (`engine.pages.kv_cache`).
    """

    keys: Tensor
    values: Tensor
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all."""
    key_scale: float = 1.0
    """Factor of a stored key, > 0; not 1 only for float8 pages."""
    value_scale: float = 1.0
    attention_scale: float | None = None
    """Factor of scores; None: 1 / sqrt(head_dim)."""

    def __post_init__(self) -> None:
        assert self.keys.stride() == self.values.stride(), "keys and values are found at the same offsets"
        assert self.keys.select(0, 0).is_contiguous(), "tokens are found in a page by its sizes"

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[1]

    @property
    def page_slots(self) -> int:
        """Slots from a block's page to that of the next block."""
        return self.keys.stride(0) // self.keys.stride(1)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.keys.shape[3]

    @property
    def score_scale(self) -> float:
        """Factor of scores, of keys as they are stored."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return scale * self.key_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Block sizes of an attention kernel."""

    keys: int
    num_warps: int
    num_stages: int
    rows: int = 0
    """Rows of a chunk's query matrix: tokens times query heads of a key head."""


@triton.jit
def attend_keys(
    state,  # (accumulator [M, BLOCK_D], maximum [M], sum [M]), float32: what the keys so far add up to
    query,  # [M, BLOCK_D] in DOT_DTYPE
    positions,  # int32 [M]: row r sees keys [0, positions[r]], or the last WINDOW of them
    keys_ptr,  # of this layer and head
    values_ptr,
    table_ptr,  # the sequence's block table
    begin,
    end,  # keys [begin, end) are attended to
    qk_scale,  # of a score, to base 2; > 0
    slot_stride,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key, and BLOCK_N divides end - begin
    DOT_DTYPE: tl.constexpr,
):
    """Add keys [begin, end) to the running softmax (Milakov and Gimelshein 2018; FlashAttention-2) and return it."""
    acc, row_max, row_sum = state
    dims = tl.arange(0, BLOCK_D)
    for first_key in range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        exists = keys < end
        if MASKED:
            blocks = tl.load(table_ptr + keys // PAGE_SIZE, mask=exists, other=0)
        else:
            blocks = tl.load(table_ptr + keys // PAGE_SIZE)
        rows = (blocks.to(tl.int64) * PAGE_SLOTS + keys % PAGE_SIZE) * slot_stride
        offsets = rows[:, None] + dims[None, :]
        # Keys beyond the context are not read, so that data of another request, even a NaN, has no effect.
        if MASKED and BLOCK_D == HEAD_DIM:
            key = tl.load(keys_ptr + offsets, mask=exists[:, None], other=0.0)
            value = tl.load(values_ptr + offsets, mask=exists[:, None], other=0.0)
        elif BLOCK_D == HEAD_DIM:
            key = tl.load(keys_ptr + offsets)
            value = tl.load(values_ptr + offsets)
        else:
            is_read = exists[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(keys_ptr + offsets, mask=is_read, other=0.0)
            value = tl.load(values_ptr + offsets, mask=is_read, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(DOT_DTYPE)), input_precision="tf32x3") * qk_scale
        if MASKED:
            visible = exists[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, HIDDEN)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT_DTYPE), value.to(DOT_DTYPE), acc * rescale[:, None], input_precision="tf32x3")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def sink_weights(sinks_ptr, heads, num_heads, row_max):
    """Return what the sinks of query heads add to sums of exponentials of scores less `row_max`.

    Without bound: sinks far above all scores leave nothing of a row. Heads from `num_heads` on have a sink of 0.
    """
    sinks = tl.load(sinks_ptr + heads, mask=heads < num_heads, other=0.0).to(tl.float32)
    return tl.exp2(sinks * _LOG2_E - row_max)

"""One layer's pages of latent rows, and the loop over rows through a block table that both attention kernels share."""
# ruff: noqa: ANN001, ANN201, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.triton_kernels.pages import HIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPages:
    """Rows of one layer."""

    rows: Tensor
    """[num_blocks, block_size, 1, rank + rope_dim], in the activations' dtype; see `LayerPages`."""
    rank: int
    """First values of a row, which are summed up."""
    score_scale: float
    """Factor of scores."""

    def __post_init__(self) -> None:
        assert self.rows.select(0, 0).is_contiguous(), "tokens are found in a page by its sizes"

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.rows.shape[1]

    @property
    def page_slots(self) -> int:
        """See `LayerPages`."""
        return self.rows.stride(0) // self.rows.stride(1)

    @property
    def rope_dim(self) -> int:
        """Last values of a row, which are rotated."""
        return self.rows.shape[3] - self.rank


@triton.jit
def load_part(start, exists, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return SIZE values behind each pointer of `start` [M, 1] that exists, [M, BLOCK]."""
    dims = tl.arange(0, BLOCK)[None, :]
    return tl.load(start + dims, mask=exists[:, None] & (dims < SIZE), other=0.0)


@triton.jit
def attend_rows(
    state,  # (accumulator [M, BLOCK_R], maximum [M], sum [M]), float32: what the rows so far add up to
    query,  # [M, BLOCK_R] in DOT_DTYPE
    rope_query,  # [M, BLOCK_P] in DOT_DTYPE
    positions,  # int32 [M]: query m sees rows [0, positions[m]]
    rows_ptr,
    table_ptr,  # the sequence's block table
    begin,
    end,  # rows [begin, end) are attended to
    qk_scale,  # of a score, to base 2
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Add rows [begin, end) to the running softmax and return it; see `pages.attend_keys`."""
    acc, row_max, row_sum = state
    for first_key in range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        exists = keys < end
        blocks = tl.load(table_ptr + keys // PAGE_SIZE, mask=exists, other=0)
        at = rows_ptr + (blocks.to(tl.int64) * PAGE_SLOTS + keys % PAGE_SIZE)[:, None] * (RANK + ROPE_DIM)
        # Rows beyond the context are not read, so that data of another request, even a NaN, has no effect.
        row = load_part(at, exists, RANK, BLOCK_R)
        rope = load_part(at + RANK, exists, ROPE_DIM, BLOCK_P)
        row = row.to(DOT_DTYPE)
        scores = tl.dot(query, tl.trans(row), input_precision="tf32x3")
        scores = tl.dot(rope_query, tl.trans(rope.to(DOT_DTYPE)), scores, input_precision="tf32x3") * qk_scale
        scores = tl.where(exists[None, :] & (keys[None, :] <= positions[:, None]), scores, HIDDEN)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT_DTYPE), row, acc * rescale[:, None], input_precision="tf32x3")
        row_max = new_max
    return acc, row_max, row_sum

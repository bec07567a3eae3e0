"""A Triton kernel that moves blocks inside a device."""
# ruff: noqa: ANN001, ANN202 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import triton
import triton.language as tl
from torch import Tensor

_WORDS_PER_PROGRAM = 1024  # of 8 bytes: 64 bytes per thread of 4 warps


@triton.jit
def _move_blocks(
    source,
    source_ids,
    target,
    target_ids,
    words_per_block,
    WORDS: tl.constexpr,
):
    item = tl.program_id(0)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = words < words_per_block
    source_id = tl.load(source_ids + item).to(tl.int64)
    target_id = tl.load(target_ids + item).to(tl.int64)
    values = tl.load(source + source_id * words_per_block + words, mask=inside)
    tl.store(target + target_id * words_per_block + words, values, mask=inside)


def move_blocks(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy block source_ids[i] of `source` over block target_ids[i] of `target`, on the current stream.

    Both are contiguous [num_blocks, words_per_block] of one integer dtype on one device; ids are int64 [num_ids] there,
    in range, and the target ids are distinct: the kernel checks neither. Mutates target.
    """
    words_per_block = source.shape[1]
    grid = (len(source_ids), triton.cdiv(words_per_block, _WORDS_PER_PROGRAM))
    _move_blocks[grid](
        source,
        source_ids,
        target,
        target_ids,
        words_per_block,
        WORDS=_WORDS_PER_PROGRAM,
        num_warps=4,
    )

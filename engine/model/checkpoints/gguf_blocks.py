"""Weights in llama.cpp's blocks: each a run of inputs of one row, with its scales, then its codes.

Types whose scales hold for 32 inputs fit the layout of grouped weights, value by value. Codes of 5 bits are kept in 8.
Others, such as Q6_K with a scale for 16 inputs, do not.

    Q4_0  d, 16 bytes                    d * (code - 8)          4 bits: byte i has the codes i and i + 16
    Q4_1  d, m, 16 bytes                 d * code + m
    Q5_0  d, fifth bits, 16 bytes        d * (code - 16)
    Q5_1  d, m, fifth bits, 16 bytes     d * code + m
    Q8_0  d, 32 bytes                    d * code                signed
    Q4_K  d, e, scales, 128 bytes        d * s * code - e * t    8 groups, each with numbers s and t of 6 bits
    Q5_K  d, e, scales, fifth bits, 128 bytes
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.grouped import GroupedWeight

_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class _Groups:
    """Codes [num_blocks, ..., 32], with float32 scales and offsets [num_blocks, ...]."""

    bits: int
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None


def unpack_blocks(type_name: str, data: Tensor, shape: tuple[int, int]) -> GroupedWeight:
    """Return the weight [out_features, in_features] from its bytes, uint8, in blocks of one of `GROUPED_TYPES`."""
    groups = GROUPED_TYPES[type_name](data.reshape(-1, _BLOCK_BYTES[type_name]))
    per_row = (shape[0], shape[1] // _GROUP_SIZE)
    return GroupedWeight(
        bits=groups.bits,
        group_size=_GROUP_SIZE,
        codes=groups.codes.reshape(shape).contiguous(),
        scales=groups.scales.reshape(per_row).contiguous(),
        offsets=None if groups.offsets is None else groups.offsets.reshape(per_row).contiguous(),
    )


def _float16(blocks: Tensor, begin: int) -> Tensor:
    """Return the number at a byte of each block, float32 [num_blocks, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the codes [..., 2 * n] of bytes [..., n]: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return 16 for each bit that is set in 4 bytes [num_blocks, 4], uint8 [num_blocks, 32]."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1) << 4


def _q4_0(blocks: Tensor) -> _Groups:
    return _Groups(4, _nibbles(blocks[:, 2:]), _float16(blocks, 0), None)


def _q4_1(blocks: Tensor) -> _Groups:
    return _Groups(4, _nibbles(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: Tensor) -> _Groups:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Groups(8, codes + (128 - 16), _float16(blocks, 0), None)


def _q5_1(blocks: Tensor) -> _Groups:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Groups(8, codes, _float16(blocks, 0), _float16(blocks, 2))


def _q8_0(blocks: Tensor) -> _Groups:
    return _Groups(8, blocks[:, 2:] ^ 128, _float16(blocks, 0), None)


def _q4_k(blocks: Tensor) -> _Groups:
    scales, offsets = _k_scales(blocks)
    return _Groups(4, _k_nibbles(blocks[:, 16:]), scales, offsets)


def _q5_k(blocks: Tensor) -> _Groups:
    scales, offsets = _k_scales(blocks)
    fifth = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # bit g belongs to group g
    return _Groups(8, _k_nibbles(blocks[:, 48:]) | fifth << 4, scales, offsets)


def _k_nibbles(packed: Tensor) -> Tensor:
    """Return the codes [num_blocks, 8, 32]: 32 bytes have the low halves of one group and the high ones of the next."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets [num_blocks, 8]; exact, as 11 bits times 6."""
    first, second, upper = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, upper & 15 | first >> 6 << 4], dim=1)
    minima = torch.cat([second & 63, upper >> 4 | second >> 6 << 4], dim=1)
    return _float16(blocks, 0) * scales.float(), -(_float16(blocks, 2) * minima.float())


GROUPED_TYPES: Mapping[str, Callable[[Tensor], _Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
"""Types that `unpack_blocks` takes, by their names in GGUF."""

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176}

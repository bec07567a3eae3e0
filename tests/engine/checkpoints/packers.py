"""Random weights, and reference packers, written from the formats' specifications, one code at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.weights.grouped import GroupedWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output whose code is in each place of a word, from the lowest bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A weight `scale * (code - zero)`."""

    bits: int
    group_size: int
    codes: Tensor
    """int64 [out_features, in_features]."""
    scales: Tensor
    """[out_features, num_groups]."""
    zeros: Tensor
    """int64 [out_features, num_groups]."""
    groups: tuple[int, ...]
    """Group of each input."""

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight, each value computed in `dtype`."""
        columns = [
            self.scales[:, group].to(dtype) * (self.codes[:, i] - self.zeros[:, group]).to(dtype)
            for i, group in enumerate(self.groups)
        ]
        return torch.stack(columns, dim=1)


def make_grid(
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Grid:
    """Return a random weight of standard deviation 0.2 or so; group_size -1: one group."""
    out_features, in_features = shape
    group_size = in_features if group_size == -1 else group_size
    num_groups = -(-in_features // group_size)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    middle = 1 << (bits - 1)
    zeros = torch.full((out_features, num_groups), middle)
    if not symmetric:
        zeros = torch.randint(1, 1 << bits, (out_features, num_groups), generator=generator)
    scales = (0.5 + torch.rand(out_features, num_groups, generator=generator)) * 0.25 / middle
    groups = torch.arange(in_features) // group_size
    if act_order:
        groups = groups[torch.randperm(in_features, generator=generator)]
    return Grid(
        bits=bits,
        group_size=group_size,
        codes=codes,
        scales=scales.to(scale_dtype),
        zeros=zeros,
        groups=tuple(groups.tolist()),
    )


def make_weight(bits: int, rows: int, columns: int, group_size: int, *, has_offsets: bool) -> GroupedWeight:
    """Return random codes, scales and offsets as kernels take them."""
    generator = torch.Generator().manual_seed(rows * columns + bits)
    grid = (rows, -(-columns // group_size))
    return GroupedWeight(
        bits=bits,
        group_size=group_size,
        codes=torch.randint(0, 2**bits, (rows, columns), generator=generator).to(torch.uint8),
        scales=torch.rand(grid, generator=generator),
        offsets=torch.randn(grid, generator=generator) if has_offsets else None,
    )


def pack_rows(rows: Iterable[Sequence[int]], bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return rows of codes as rows of int32 words; the last word of a row is filled up with zeros.

    `order` names the code in each place of a word, from the lowest bits; None: ascending.
    """
    per_word = 32 // bits
    order = order or range(per_word)
    packed = []
    for row in rows:
        padded = [*row, *[0] * (-len(row) % per_word)]
        words = []
        for begin in range(0, len(padded), per_word):
            word = sum((padded[begin + code] % (1 << bits)) << (bits * place) for place, code in enumerate(order))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(words)
    return torch.tensor(packed, dtype=torch.int32)


def pack_gptq(grid: Grid, *, v2: bool = False) -> dict[str, Tensor]:
    """Return a module's tensors in a GPTQ checkpoint; zero points are at least 1."""
    zeros = grid.zeros if v2 else grid.zeros - 1
    return {
        "qweight": pack_rows(grid.codes.tolist(), grid.bits).t().contiguous(),
        "qzeros": pack_rows(zeros.t().tolist(), grid.bits),
        "scales": grid.scales.t().contiguous(),
        "g_idx": torch.tensor(grid.groups, dtype=torch.int32),
    }


def pack_awq(grid: Grid) -> dict[str, Tensor]:
    """Return a module's tensors in an AWQ checkpoint."""
    return {
        "qweight": pack_rows(grid.codes.t().tolist(), 4, AWQ_ORDER),
        "qzeros": pack_rows(grid.zeros.t().tolist(), 4, AWQ_ORDER),
        "scales": grid.scales.t().contiguous(),
    }


def pack_compressed(grid: Grid, *, symmetric: bool) -> dict[str, Tensor]:
    """Return a module's tensors in a compressed-tensors checkpoint of format pack-quantized."""
    parts = {
        "weight_packed": pack_rows(grid.codes.tolist(), grid.bits),
        "weight_scale": grid.scales,
        "weight_shape": torch.tensor(grid.codes.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = pack_rows(grid.zeros.t().tolist(), grid.bits).t().contiguous()
    return parts


def compressed_config(*, bits: int = 4, group_size: int = 32, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors; group_size -1: a scale for each channel."""
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    if group_size != -1:
        weights |= {"strategy": "group", "group_size": group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        **changes,
    }

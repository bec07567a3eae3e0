"""Joins the parts of a fused projection, which a checkpoint may store in different formats."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.weights.decoder_weights import Linear
from engine.weights.grouped import GroupedLinear, GroupedWeight, concatenate


def fuse(parts: Sequence[GroupedWeight | Tensor], bias: Tensor | None, like: Tensor) -> GroupedLinear | Linear:
    """Return the projection whose rows are those of all parts, on the device and, when plain, in the dtype of `like`.

    Grids of different bits and group sizes are rewritten, without rounding, on those that hold all of them. With a
    plain part among them, all become plain.
    """
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts):
        group_size = min(part.group_size for part in grouped)
        if all(part.group_size % group_size == 0 for part in grouped):
            bits = max(part.bits for part in grouped)
            joined = concatenate([_rewritten(part, bits, group_size) for part in grouped])
            return GroupedLinear(_moved(joined, like.device), bias)
    weight = torch.empty(
        [sum(part.shape[0] for part in parts), parts[0].shape[1]], dtype=like.dtype, device=like.device
    )
    begin = 0
    for part in parts:
        end = begin + part.shape[0]
        weight[begin:end].copy_(part.dequantize(like.dtype) if isinstance(part, GroupedWeight) else part)
        begin = end
    return Linear(weight=weight, bias=bias)


def _rewritten(weight: GroupedWeight, bits: int, group_size: int) -> GroupedWeight:
    """Return the same values in as many bits or more, in groups of a size that divides the weight's own."""
    repeats = weight.group_size // group_size
    num_groups = -(-weight.shape[1] // group_size)

    def spread(per_group: Tensor) -> Tensor:
        return per_group if repeats == 1 else per_group.repeat_interleave(repeats, dim=1)[:, :num_groups]

    codes = weight.codes
    if weight.offsets is None:  # the grid stays symmetric, about the middle of more codes
        codes = codes + ((1 << (bits - 1)) - (1 << (weight.bits - 1))) if bits > weight.bits else codes
    return GroupedWeight(
        bits=bits,
        group_size=group_size,
        codes=codes,
        scales=spread(weight.scales),
        offsets=None if weight.offsets is None else spread(weight.offsets),
    )


def _moved(weight: GroupedWeight, device: torch.device) -> GroupedWeight:
    offsets = None if weight.offsets is None else weight.offsets.to(device)
    return replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device), offsets=offsets)

"""Weights in 4 or 8 bits: integer codes on a grid per group of inputs.

Every quantized format of a checkpoint is read into this one layout, and every kernel computes from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.weights.decoder_weights import Linear, Projection

_SHORT_SPAN, _LONG_SPAN = 32, 128  # inputs that share a scale in the kernels (rounded.h)
_LARGEST_CODE, _SMALLEST = 127, 2.0**-120


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A weight [out_features, in_features]: `scale * code + offset`, with both per row and group of inputs."""

    bits: int
    """4 or 8."""
    group_size: int
    """Consecutive inputs that share a scale; a multiple of 32, or all inputs."""
    codes: Tensor
    """uint8 [out_features, in_features], each below 2**bits."""
    scales: Tensor
    """float32 [out_features, ceil(in_features / group_size)]."""
    offsets: Tensor | None
    """float32, shaped like `scales`; None: the grid is symmetric, and the offset is -2**(bits - 1) scales."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and offsets as kernels read them, with scales and offsets in 16 bits."""
        num_scales = self.scales.numel() * (1 if self.offsets is None else 2)
        return self.codes.numel() * self.bits // 8 + 2 * num_scales

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the values [out_features, in_features], computed in float32 and rounded once to `dtype`."""
        codes = self.codes.float()
        if self.offsets is None:
            return ((codes - 2.0 ** (self.bits - 1)) * self._per_input(self.scales)).to(dtype)
        return torch.addcmul(self._per_input(self.offsets), codes, self._per_input(self.scales)).to(dtype)

    def _per_input(self, per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(self.group_size, dim=1)[:, : self.codes.shape[1]]


class GroupedLinear:
    """A projection with grouped weights; a `Projection`. Right on any device and slow: kernels take its place."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        """Keep weight and bias [out_features]."""
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """See `Projection`."""
        return self.weight.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features], in x's dtype."""
        return self.dequantize(x.dtype)(x)

    def dequantize(self, dtype: torch.dtype) -> Linear:
        """Return the plain projection of the same values."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return Linear(weight=self.weight.dequantize(dtype), bias=bias)


class RoundedInputs:
    """A projection whose inputs are rounded as the compiled kernels round those of grouped weights; a `Projection`."""

    def __init__(self, projection: Projection, span: int) -> None:
        """Keep the projection that multiplies. `span` inputs share a scale: `input_span` of its weight."""
        self._projection = projection
        self._span = span

    @property
    def num_bytes(self) -> int:
        """See `Projection`."""
        return self._projection.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the projection of x [num_tokens, in_features] in 255 steps for each span of inputs."""
        return self._projection(round_inputs(x, self._span))


def input_span(group_size: int, in_features: int) -> int:
    """Return how many inputs share a scale beside weights in groups of a size: more where whole rows of weights do."""
    return _LONG_SPAN if group_size >= in_features else _SHORT_SPAN


def round_inputs(x: Tensor, span: int) -> Tensor:
    """Return inputs [num_tokens, in_features] in the 255 steps for each `span` that the compiled kernels take."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % span)).reshape(len(x), -1, span)
    largest = blocks.abs().amax(2, keepdim=True)
    codes = torch.where(largest > _SMALLEST, blocks * (_LARGEST_CODE / largest), blocks * 0).round_()
    return (codes * (largest / _LARGEST_CODE)).flatten(1)[:, : x.shape[1]].to(x.dtype)


def concatenate(parts: list[GroupedWeight]) -> GroupedWeight:
    """Return the weight whose rows are those of all parts. The parts have equal bits and group sizes."""
    first = parts[0]
    assert all((part.bits, part.group_size) == (first.bits, first.group_size) for part in parts), "unequal formats"
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([_offsets(part) for part in parts])
    return GroupedWeight(
        bits=first.bits,
        group_size=first.group_size,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=offsets,
    )


def split(weight: GroupedWeight, rows: Sequence[int]) -> Iterator[GroupedWeight]:
    """Yield parts of so many rows each, of the same grid as the whole."""
    begin = 0
    for count in rows:
        part = slice(begin, begin := begin + count)
        offsets = None if weight.offsets is None else weight.offsets[part]
        yield replace(weight, codes=weight.codes[part], scales=weight.scales[part], offsets=offsets)


def _offsets(weight: GroupedWeight) -> Tensor:
    return weight.scales * -(2.0 ** (weight.bits - 1)) if weight.offsets is None else weight.offsets

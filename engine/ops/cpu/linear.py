"""Projections whose weight is packed for the CPU kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.weights import DecoderWeights, Linear
from engine.ops.cpu.arena import Arena, padded
from engine.ops.cpu.library import CpuKernels, PackedWeight


class PackedLinear:
    """A projection, read as one stream per product: at few rows it runs at the speed of memory. Rows are independent:
    a row's result does not change with the other rows, bit for bit.
    """

    def __init__(self, linear: Linear, kernels: CpuKernels, arena: Arena) -> None:
        """Copy the weight [out_features, in_features] into the kernels' layout. in_features must be even."""
        self._kernels = kernels
        out_features, in_features = linear.weight.shape
        self._bias = linear.bias
        weight = linear.weight.contiguous()
        self._packed = arena.allocate(_packed_size(linear, kernels), weight.dtype)
        kernels.pack(weight.data_ptr(), self._packed.data_ptr(), out_features, in_features)
        self.address = PackedWeight(
            packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            columns=out_features,
            depth=in_features,
        )
        """For kernels that take several; valid while this lives."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features]; x is contiguous [num_tokens, in_features]."""
        return self._multiply(self._kernels.linear, x, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """As a call, but in float32: the sums are not rounded."""
        return self._multiply(self._kernels.wide_linear, x, torch.float32)

    def _multiply(self, kernel: Callable[..., None], x: Tensor, dtype: torch.dtype) -> Tensor:
        weight, num_tokens = self.address, x.shape[0]
        y = torch.empty((num_tokens, weight.columns), dtype=dtype)
        kernel(x.data_ptr(), weight.packed, weight.bias, y.data_ptr(), num_tokens, weight.columns, weight.depth)
        return y


def can_pack_all(weights: DecoderWeights) -> bool:
    """Whether the kernels take every projection: two numbers of a row are multiplied at a time."""
    return all(linear.weight.shape[1] % 2 == 0 for linear in weights.plain_projections())


def pack_projections(weights: DecoderWeights, kernels: CpuKernels) -> None:
    """Replace every projection by a packed one. Mutates `weights`."""
    sizes = (padded(_packed_size(linear, kernels), linear.weight.dtype) for linear in weights.plain_projections())
    arena = Arena(sum(sizes))
    weights.replace_projections(lambda linear: PackedLinear(linear, kernels, arena))


def _packed_size(linear: Linear, kernels: CpuKernels) -> int:
    return int(kernels.packed_size(*linear.weight.shape))

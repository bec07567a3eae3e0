"""Projections whose weight is packed for the CPU kernels."""

import torch
from torch import Tensor

from engine.model.weights import DecoderWeights, Linear
from engine.ops.cpu.arena import Arena, padded
from engine.ops.cpu.library import CpuKernels


class PackedLinear:
    """A projection, read as one stream per product: at few rows it runs at the speed of memory. Rows are independent:
    a row's result does not change with the other rows, bit for bit.
    """

    def __init__(self, linear: Linear, kernels: CpuKernels, arena: Arena) -> None:
        """Copy the weight [out_features, in_features] into the kernels' layout. in_features must be even."""
        self._kernels = kernels
        self._out_features, self._in_features = linear.weight.shape
        self._bias = linear.bias
        weight = linear.weight.contiguous()
        self._packed = arena.allocate(_packed_size(linear, kernels), weight.dtype)
        kernels.pack(weight.data_ptr(), self._packed.data_ptr(), self._out_features, self._in_features)
        self._packed_at = self._packed.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features]; x is contiguous [num_tokens, in_features]."""
        num_tokens = x.shape[0]
        y = torch.empty((num_tokens, self._out_features), dtype=x.dtype)
        self._kernels.linear(
            x.data_ptr(),
            self._packed_at,
            self._bias_at,
            y.data_ptr(),
            num_tokens,
            self._out_features,
            self._in_features,
        )
        return y


def pack_projections(weights: DecoderWeights, kernels: CpuKernels) -> None:
    """Replace every projection by a packed one. Mutates `weights`."""
    sizes = (padded(_packed_size(linear, kernels), linear.weight.dtype) for linear in weights.plain_projections())
    arena = Arena(sum(sizes))
    weights.replace_projections(lambda linear: PackedLinear(linear, kernels, arena))


def _packed_size(linear: Linear, kernels: CpuKernels) -> int:
    return int(kernels.packed_size(*linear.weight.shape))

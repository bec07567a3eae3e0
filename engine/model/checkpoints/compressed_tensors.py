"""compressed-tensors checkpoints, as LLM Compressor writes them.

A quantized module of `in` inputs and `out` outputs has

    weight_scale       [out, groups], [out, 1], or one number
    weight_packed      int32 [out, in * bits / 32]   pack-quantized: codes, packed along the inputs
    weight_zero_point  int32 [out * bits / 32, groups], packed along the outputs; none when symmetric
    weight_shape       [2]
    weight             int8 [out, in]                int-quantized; the zero point, if any, is int8 [out, groups]
    weight             float8_e4m3fn [out, in]       float-quantized

The value of an integer is scale * (code - zero), with both packed plus 2**(bits - 1).

Only weights are read: whether activations are rounded is the kernels' choice, whatever `input_activations` says. float8
weights are dequantized: most devices multiply no float8, and those that do get the same arithmetic from a plain
checkpoint by `model.quantization: fp8`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.formats import BadModule, supported
from engine.model.checkpoints.packing import (
    codes_per_word,
    expect_shape,
    grid,
    is_in_order,
    scatter_groups,
    unpack_words,
)
from engine.weights.config import UnsupportedModel
from engine.weights.grouped import GroupedWeight

_BITS = (4, 8)
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    """A `WeightFormat`."""

    group_sizes: tuple[int, ...]
    """Inputs that share a scale, in each of the schemes that have groups."""

    method = "compressed-tensors"
    marker = "weight_scale"
    parts = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    ignored = (".input_scale", ".input_zero_point", ".output_scale", ".q_scale", ".k_scale", ".v_scale")

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """See `WeightFormat`. Groups out of order, and float8, give a plain tensor."""
        out_features, in_features = shape
        scales = parts["weight_scale"].reshape(-1, parts["weight_scale"].shape[-1] if parts["weight_scale"].ndim else 1)
        if len(scales) == 1:
            scales = scales.expand(out_features, -1)
        weight = parts.get("weight")
        if weight is not None and weight.dtype is torch.float8_e4m3fn:
            expect_shape("weight", weight, shape)
            expect_shape("weight_scale", scales, (out_features, 1))
            return weight.float() * scales.float()
        group_size = self._group_size(in_features, num_groups=scales.shape[1])
        expect_shape("weight_scale", scales, (out_features, -(-in_features // group_size)))
        bits, codes, zeros = _packed(parts, shape) if weight is None else _unpacked(weight, parts, shape)
        if zeros is not None:
            expect_shape("weight_zero_point", zeros, tuple(scales.shape))
        group_of_input = parts.get("weight_g_idx")
        if group_of_input is not None and not is_in_order(group_of_input, group_size):
            expect_shape("weight_g_idx", group_of_input, (in_features,))
            zeros = torch.full_like(scales, 1 << (bits - 1)) if zeros is None else zeros
            return scatter_groups(codes, scales, zeros, group_of_input)
        return grid(bits, codes, scales, zeros, group_size=group_size)

    def _group_size(self, in_features: int, *, num_groups: int) -> int:
        if num_groups == 1:
            return in_features
        for size in self.group_sizes:
            if -(-in_features // size) == num_groups:
                return size
        raise BadModule(f"{in_features} inputs in {num_groups} groups have none of the sizes {self.group_sizes}")


_Grid = tuple[int, Tensor, Tensor | None]
"""Bits, codes [out_features, in_features] and zero points [out_features, num_groups]; no zero points: symmetric."""


def _packed(parts: Mapping[str, Tensor], shape: tuple[int, int]) -> _Grid:
    out_features, in_features = shape
    words, zero_words = parts.get("weight_packed"), parts.get("weight_zero_point")
    if words is None:
        raise BadModule("neither weight nor weight_packed is there")
    bits = next((bits for bits in _BITS if words.shape[-1] == -(-in_features // codes_per_word(bits))), None)
    if bits is None:
        raise BadModule(
            f"weight_packed has shape {list(words.shape)}, for {in_features} inputs of neither 4 nor 8 bits"
        )
    expect_shape("weight_packed", words, (out_features, words.shape[-1]))
    codes = unpack_words(words, bits).flatten(1)[:, :in_features]
    if zero_words is None:
        return bits, codes, None
    return bits, codes, unpack_words(zero_words.t(), bits).flatten(1).t()[:out_features]


def _unpacked(weight: Tensor, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> _Grid:
    expect_shape("weight", weight, shape)
    if weight.dtype is not torch.int8:
        raise BadModule(f"weight is stored as {weight.dtype}, neither int8 nor float8_e4m3fn")
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = zeros.reshape(-1, zeros.shape[-1] if zeros.ndim else 1).short().expand(shape[0], -1) + 128
    return 8, weight.view(torch.uint8) ^ 128, zeros


def read_format(config: Mapping[str, Any]) -> CompressedTensorsFormat:
    """Return the format that a `quantization_config` describes. Raises UnsupportedModel."""
    supported({"quantization_status": "compressed", **config}, "quantization_status", ("compressed",))
    supported(config, "format", (*_FORMATS, "mixed-precision"))
    for key, neutral in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        found = (config.get(key) or {}).get(neutral)
        if found and found != "dense":
            raise UnsupportedModel(f"quantization_config.{key}.{neutral}: {found!r} is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UnsupportedModel(
            f"quantization_config.config_groups: {groups!r} is not supported; it describes no weights"
        )
    sizes = (_check_scheme(name, group) for name, group in groups.items())
    return CompressedTensorsFormat(group_sizes=tuple(sorted({size for size in sizes if size is not None})))


def _check_scheme(name: str, group: Mapping[str, Any]) -> int | None:
    """Return the size of a scheme's groups of inputs, None when it has none. Raises UnsupportedModel."""
    weights = group.get("weights")
    if weights is None:
        return None
    if group.get("format") is not None:
        supported(group, "format", _FORMATS, where=f"config_groups.{name}.")
    where = f"config_groups.{name}.weights."
    if supported({"type": "int", **weights}, "type", ("int", "float"), where=where) == "float":
        supported(weights, "num_bits", (8,), where=where)
        supported(weights, "strategy", ("channel", "tensor"), where=where)
        return None
    supported(weights, "num_bits", _BITS, where=where)
    if supported(weights, "strategy", ("group", "channel", "tensor"), where=where) != "group":
        return None
    size = weights.get("group_size")
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModel(f"quantization_config.{where}group_size: {size!r} is not a positive number")
    return size

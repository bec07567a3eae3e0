"""Experts that a checkpoint stores in one tensor for all of a layer, read as if each had its own.

    input_linear.weight [num_experts, 2 * size, hidden_size]     output_linear.weight [num_experts, hidden_size, size]

as Granite does; otherwise

    gate_up_proj [num_experts, hidden_size, 2 * size]       down_proj [num_experts, size, hidden_size]
    gate_up_proj_bias [num_experts, 2 * size]               down_proj_bias [num_experts, hidden_size]

Outputs of gate and up alternate (gpt-oss), or those of gate come first (Granite, Llama 4). In place of a weight there
may be two tensors in MXFP4 (Open Compute Project, "Microscaling Formats", 2023), whose rows are outputs and which are
widened as they are read, without rounding:

    gate_up_proj_blocks uint8 [num_experts, outputs, groups, 16]      two values of 4 bits in a byte, the first one low
    gate_up_proj_scales uint8 [num_experts, outputs, groups]          power of two of the 32 values, plus 127
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from engine.weights.config import UnsupportedModel
from engine.weights.experts import ExpertsConfig

_STACK = re.compile(r"(?P<module>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<part>|_bias|_blocks|_scales)")
_LINEAR_STACK = re.compile(r"(?P<module>.+)\.(?P<projection>input_linear|output_linear)\.weight")
_NUM_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))
# The two values of each byte, in one number of 32 bits; and the factor of each scale. bfloat16 has all of them.
_PAIRS = torch.tensor([(_VALUES[byte % 16], _VALUES[byte // 16]) for byte in range(256)]).bfloat16().view(torch.int32)
_FACTORS = torch.tensor([2.0 ** (scale - 127) for scale in range(256)], dtype=torch.float64).bfloat16()


class StackOrder(Enum):
    """Order of the outputs of gate and up."""

    ALTERNATE = 0
    HALVES = 1


def stack_order(experts: ExpertsConfig | None) -> StackOrder | None:
    """Return the order in the stacks of a model; None: it has no stacks."""
    if experts is None or not experts.are_stacked:
        return None
    return StackOrder.HALVES if experts.has_stacked_halves else StackOrder.ALTERNATE


def split_experts(files: Mapping[str, Any], order: StackOrder) -> dict[str, Any]:
    """Return the open file of each tensor, given those of stored ones: stacks become tensors of single experts.

    Raises UnsupportedModel for a stack of another shape.
    """
    split: dict[str, Any] = {}
    for name, file in files.items():
        if (linear := _LINEAR_STACK.fullmatch(name)) and len(shape := file.get_slice(name).get_shape()) == 3:
            for expert_idx in range(shape[0]):
                for projection, outputs in _outputs(linear["projection"], shape[1], order).items():
                    expert = _ExpertTensor(files, name, "_rows", expert_idx, outputs)
                    split[f"{linear['module']}.experts.{expert_idx}.{projection}.weight"] = expert
            continue
        found = _STACK.fullmatch(name)
        if found is None:
            split[name] = file
            continue
        shape = file.get_slice(name).get_shape()
        if len(shape) != _NUM_DIMENSIONS[found["part"]]:
            raise UnsupportedModel(f"{name} has shape {shape}, which is not that of stacked experts")
        if found["part"] == "_scales":
            continue  # read with the blocks
        field = "bias" if found["part"] == "_bias" else "weight"
        for expert_idx in range(shape[0]):
            num_outputs = shape[1] if found["part"] in ("_bias", "_blocks") else shape[-1]
            for projection, outputs in _outputs(found["projection"], num_outputs, order).items():
                expert = _ExpertTensor(files, name, found["part"], expert_idx, outputs)
                split[f"{found['module']}.{expert_idx}.{projection}.{field}"] = expert
    return split


def _outputs(projection: str, count: int, order: StackOrder) -> dict[str, slice]:
    """Return the outputs of each single projection in a stacked one."""
    if projection in ("down_proj", "output_linear"):
        return {"down_proj": slice(None)}
    if order is StackOrder.ALTERNATE:
        return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    return {"gate_proj": slice(0, count // 2), "up_proj": slice(count // 2, None)}


@dataclass(frozen=True, slots=True)
class _ExpertTensor:
    """A tensor of one expert, in the place of an open file that has it."""

    files: Mapping[str, Any]
    stack: str
    """Name of the stored tensor."""
    part: str
    expert_idx: int
    outputs: slice

    def get_tensor(self, _name: str) -> Tensor:
        """Return the outputs' rows, or biases. Raises UnsupportedModel."""
        stored = self._stored(self.stack)
        match self.part:
            case "_blocks":
                scales = self.stack.removesuffix("blocks") + "scales"
                return _widened(self.stack, stored[self.outputs], self._stored(scales)[self.outputs])
            case "_bias" | "_rows":
                return stored[self.outputs]
            case _:
                return stored[:, self.outputs].t()

    def _stored(self, name: str) -> Tensor:
        """Return the expert's part of a stored tensor."""
        if name not in self.files:
            raise UnsupportedModel(f"{name} is missing in the checkpoint")
        part: Tensor = self.files[name].get_slice(name)[self.expert_idx]
        return part


def _widened(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 values [outputs, inputs] of MXFP4's two tensors of an expert."""
    if {blocks.dtype, scales.dtype} != {torch.uint8} or scales.shape != blocks.shape[:2]:
        raise UnsupportedModel(
            f"cannot read {name}: {list(blocks.shape)} {blocks.dtype} and scales {list(scales.shape)} {scales.dtype}"
            " do not belong together"
        )
    values = _PAIRS.flatten().index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    return values.view(*scales.shape, -1).mul_(_FACTORS[scales.int()][..., None]).flatten(1)

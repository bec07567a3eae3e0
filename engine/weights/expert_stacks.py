"""Mixtures of experts on a GPU: all experts of a layer in two grouped products, which wait for no word of the host.

    tokens ─ router ─ a row for each chosen expert, sorted by expert ─ gate, up ─ activation ─ down ─ sums per token

Every token has the same number of rows, and where an expert's rows end is a number on the device: shapes depend on the
number of tokens alone, so that a CUDA graph can capture all of it. torch has the grouped products for a CPU, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.weights.config import DecoderConfig, UnsupportedModel
from engine.weights.decoder_weights import Linear, Moe

_ALIGNMENT_BYTES = 16
"""Alignment of the rows of both factors of a grouped product. Groups are whole rows, so they may begin anywhere."""
_SUMMED_TOKENS = 1024
"""Tokens whose experts' results are added up at a time, in float32: more would take memory, less time on the host."""


def check_experts(config: DecoderConfig, quantized_by: str | None, *, device: torch.device) -> None:
    """Raise UnsupportedModel for a mixture that a GPU does not compute. Called before weights load.

    `quantized_by` is the method or format of weights in few bits; None: they are plain, or widened while they are read.
    """
    if config.experts is None or device.type != "cuda":
        return
    if quantized_by is not None:
        raise UnsupportedModel(
            f"cannot compute a mixture of experts in {quantized_by} on a GPU: its weights have to be plain; leave"
            " model.quantization out and use a plain checkpoint, or set model.device: cpu or model.engine: vllm"
        )
    if not hasattr(F, "grouped_mm"):
        raise UnsupportedModel(
            f"cannot compute a mixture of experts on a GPU: torch {torch.__version__} has no grouped_mm; install torch"
            " 2.10 or later"
        )


def padded_features(num_features: int, dtype: torch.dtype) -> int:
    """Return the length of rows of so many features, with padding, in a grouped product."""
    multiple = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-num_features // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack:
    """One projection of all experts of a layer that tokens choose from."""

    weight: Tensor
    """[num_experts, out_features, padded_features], 0 behind `in_features`."""
    bias: Tensor | None
    """[num_experts, out_features]."""
    in_features: int

    def linear(self, expert_idx: int) -> Linear:
        """Return an expert's projection: a view."""
        bias = None if self.bias is None else self.bias[expert_idx]
        return Linear(weight=self.weight[expert_idx, :, : self.in_features], bias=bias)

    def __call__(self, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Return each row times its expert's weights, [num_rows, out_features], contiguous.

        x [num_rows, in_features] is sorted by expert, experts int64 [num_rows] names each row's, and ends int32
        [num_experts] has the row behind each expert's last one.
        """
        padding = self.weight.shape[2] - self.in_features
        products = F.grouped_mm(F.pad(x, (0, padding)) if padding else x, self.weight.transpose(1, 2), offs=ends)
        if self.bias is not None:
            products += self.bias.index_select(0, experts)
        return products.contiguous()  # torch pads its rows


@dataclass(slots=True, kw_only=True)
class StackedMoe(Moe):
    """A mixture whose experts, but for the shared one, are views of two tensors."""

    gate_up: ExpertStack
    down: ExpertStack

    def sums(self, x: Tensor, gate_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """See `Moe`; a row's results are added up in the order of their scores."""
        num_experts, num_chosen = self.config.num_experts, self.config.num_chosen
        logits = self.router(x).float()
        weights, chosen = self.choose(logits[:, :num_experts])
        experts, order = chosen.flatten().sort(stable=True)
        expert_ids = torch.arange(num_experts, device=x.device)
        ends = torch.searchsorted(experts, expert_ids, right=True, out_int32=True)
        multiply = self.activation(gate_mul)
        rows = x.index_select(0, order // num_chosen)
        if self.config.has_weighted_inputs:
            rows = (rows * weights.flatten().index_select(0, order)[:, None]).to(x.dtype)
            weights = torch.ones_like(weights)
        results = self.down(multiply(self.gate_up(rows, experts, ends)), experts, ends)
        sums = _sums(torch.empty_like(results).index_copy_(0, order, results), weights)
        if self.config.shared is not None:
            shared = self.experts[num_experts](x, multiply)
            sums += shared if self.config.shared.gate is None else shared * logits[:, num_experts:].sigmoid()
        return sums


def _sums(results: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of each token's rows, float32 [num_tokens, hidden_size].

    results [num_tokens * num_chosen, hidden_size], weights float32 [num_tokens, num_chosen].
    """
    num_tokens, num_chosen = weights.shape
    sums = torch.empty((num_tokens, results.shape[1]), dtype=torch.float32, device=results.device)
    of_tokens = results.view(num_tokens, num_chosen, -1)
    for begin in range(0, num_tokens, _SUMMED_TOKENS):
        part = slice(begin, begin + _SUMMED_TOKENS)
        torch.sum(of_tokens[part] * weights[part, :, None], dim=1, out=sums[part])
    return sums

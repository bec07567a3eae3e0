"""Fused norms of vLLM's CPU build.

Without `torch.compile`, vLLM computes an RMSNorm on CPUs by a chain of torch operations, which take a quarter of a step
with a prompt. Its CPU build has kernels for it that are eight times as fast, and does not call them. Here they are
called, so that a step needs neither a compiler nor its half a minute at start. They round once where the chain rounds
twice. (Its kernel of SiLU and product is slower than torch's two operations, and stays unused.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NUM_LANES = 16
"""A row has to be a multiple of a vector's elements, at most so many."""

Norm = Callable[..., Tensor | tuple[Tensor, Tensor]]


def use_fused_norms(model: Any) -> None:
    """Let the norms of a loaded model be computed by fused kernels, where these can."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    if not (hasattr(torch.ops._C, "rms_norm") and hasattr(torch.ops._C, "fused_add_rms_norm")):  # noqa: SLF001
        return  # another processor's build
    for layer in model.modules():
        is_plain = type(layer) is RMSNorm and layer.has_weight and layer.variance_size_override is None
        if is_plain and layer.hidden_size % _NUM_LANES == 0:
            layer._forward_method = _fused_norm(layer)  # noqa: SLF001 - vLLM chooses it when it makes the layer


def _fused_norm(layer: Any) -> Norm:
    """Return `forward` of an RMSNorm: the norm of x, or of its sum with a residual, and that sum."""
    kernels: Any = torch.ops._C  # noqa: SLF001 - so vLLM names them
    weight, epsilon, native = layer.weight.data, layer.variance_epsilon, layer.forward_native

    def forward(x: Tensor, residual: Tensor | None = None) -> Any:
        if x.dtype != weight.dtype:
            return native(x, residual)
        if residual is None:
            rows = x.reshape(-1, x.shape[-1]).contiguous()  # heads are views of wider rows
            normed = torch.empty_like(rows)
            kernels.rms_norm(normed, rows, weight, epsilon)
            return normed.view(x.shape)
        if not (x.is_contiguous() and residual.is_contiguous()):
            return native(x, residual)
        kernels.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual

    return forward

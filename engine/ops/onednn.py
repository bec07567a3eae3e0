"""Projections on oneDNN's packed weights: for CPUs with tile registers, and where our kernels are not compiled."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.weights import Linear

# Two rows meet a slow oneDNN kernel, ten times slower than four rows on some processors.
_SLOW_ROWS, _PADDED_ROWS = 2, 4


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with packed weights of this dtype on this CPU."""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not is_built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return weight.dtype is torch.float32


class OneDnnLinear:
    """A projection in oneDNN's blocked layout. A plain weight is rearranged inside every single matrix product."""

    def __init__(self, linear: Linear) -> None:
        """Copy the weight [out_features, in_features]."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, None)  # noqa: SLF001 - its only name
        self._bias = linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features]."""
        num_tokens = x.shape[0]
        if num_tokens == _SLOW_ROWS:
            x = F.pad(x, (0, 0, 0, _PADDED_ROWS - _SLOW_ROWS))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x, self._weight, self._bias, "none", [], ""
        )
        return product[:num_tokens]

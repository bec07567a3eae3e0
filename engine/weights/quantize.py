"""Weights in 4 and 8 bits, and KV pages in 8.

    fp8    Weights e4m3 with a scale per output channel, activations e4m3 with a dynamic scale per token
           (arXiv:2209.05433). Half the bytes of bfloat16, and twice its rate on Hopper. Other devices multiply the same
           values in wider numbers, which measures quality and saves nothing.
    int8   On a CPU: weights in 8 bits with a scale for each 32 inputs, activations likewise. On a GPU: weights int8
           with a scale per output channel, activations unchanged.
    int4   As int8 on a CPU, but with 4 bits and an offset for each 32 inputs in the layers. CPUs only.
    kv     Keys and values e4m3 on GPUs, with one scale per layer each (on CPUs: `engine.pages.kv_format`). The scale is
           a power of two, so that it costs no precision, and is computed from the weights alone, so that all workers of
           a model agree on it.

Embedding, norms and the routers of experts keep the model's dtype, and so does the output head except for integers on a
CPU: it saves little elsewhere, and is a third of all bytes that a small model reads for a token.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.weights.config import DecoderConfig, UnsupportedModel
from engine.weights.decoder_weights import HEAD_FIELD, ROUTER_FIELD, Convert, DecoderWeights, Linear, Projection, plain
from engine.weights.grouped import GroupedLinear, input_span
from engine.weights.layout import all_projections, checkpoint_views
from engine.weights.rounding import round_to_affine_grid, round_to_grid

logger = logging.getLogger(__name__)

QuantizationMethod = Literal["fp8", "int8", "int4"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_INT8_MAX = 127.0
_FP8_ALIGNMENT = 16  # of both dimensions, in Hopper's matrix products
_FP8_CAPABILITIES = (9, 10)
"""Major numbers: Hopper and the Blackwells of servers. The kernels need more shared memory than 12.x has."""

# Bound of keys and values in standard deviations of the largest channel, estimated from the weights. e4m3 keeps its
# precision down to 1/28672 of its maximum: too large a bound costs nothing, too small a bound saturates.
_KV_HEADROOM = 32.0

_GROUP_SIZE = 32  # inputs that share a scale, as in activations
_LOG_INTERVAL_S = 10.0

# Rows up to which int8 products take the weights as they are. Above, products take the time, and widened weights, which
# are written and read again (5 bytes of traffic for each instead of 1), have the faster ones.
_CUDA_INT8_ROWS = 256


def check_quantization(method: str | None, config: DecoderConfig, *, device: torch.device) -> None:
    """Raise UnsupportedModel when the model or device does not allow the method. Called before weights load."""
    if method is not None and method not in get_args(QuantizationMethod):
        known = ", ".join(get_args(QuantizationMethod))
        raise UnsupportedModel(f"quantization: {method!r} is not supported; supported are {known}")
    if device.type != "cuda":
        return
    if method == "int4":
        raise UnsupportedModel("quantization: int4 is computed by CPUs alone; use fp8 or int8 on a GPU")
    if method != "fp8":
        return
    check_fp8(device)
    sizes = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if any(size % _FP8_ALIGNMENT for size in sizes):
        raise UnsupportedModel(f"fp8 needs sizes that are multiples of {_FP8_ALIGNMENT}; this model has {sizes}")


def check_fp8(device: torch.device) -> None:
    """Raise UnsupportedModel for a CUDA device on which the kernels for 8-bit floats do not run."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _FP8_CAPABILITIES:
        raise UnsupportedModel(
            "fp8 needs a GPU of compute capability 9.0 or 10.x;"
            f" {torch.cuda.get_device_name(device)} has {major}.{minor}"
        )


def check_finite(weights: DecoderWeights, config: DecoderConfig) -> None:
    """Raise UnsupportedModel, naming the tensor, when a weight to be rounded is not a number. All weights are plain."""
    for name, view in checkpoint_views(weights, config).items():
        if view.ndim == 2:
            refuse_unless_finite(name, view)


def refuse_unless_finite(name: str, weight: Tensor) -> None:
    """Raise UnsupportedModel for a tensor with NaN or infinity: no code stands for them, and they would become 0."""
    lowest, highest = weight.aminmax()
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise UnsupportedModel(f"cannot quantize {name}: it holds NaN or infinity; the checkpoint is damaged")


def quantize_weights(weights: DecoderWeights, config: DecoderConfig, method: QuantizationMethod) -> None:
    """Replace the plain projections by those of a method, one by one. Mutates `weights`.

    Logs its progress now and then. Raises UnsupportedModel for weights that are not numbers.
    """
    check_finite(weights, config)
    weights.convert_projections(quantizer(config, method, device=weights.embedding.device))


def quantizer(config: DecoderConfig, method: QuantizationMethod, *, device: torch.device) -> Convert:
    """Return the conversion of plain projections by a method, for one model: it logs its progress."""
    is_cpu = device.type == "cpu"
    logged_s, num_rounded = time.monotonic(), 0
    num_projections = len(list(all_projections(config))) + 1

    def convert(field: str, projection: Projection) -> Projection:
        nonlocal logged_s, num_rounded
        if time.monotonic() - logged_s > _LOG_INTERVAL_S:
            logged_s = time.monotonic()
            logger.info("rounding weights to %s: %d of %d projections", method, num_rounded, num_projections)
        num_rounded += 1
        return rounded(field, projection)

    def rounded(field: str, projection: Projection) -> Projection:
        if not isinstance(projection, Linear) or field == ROUTER_FIELD:
            return projection
        if is_cpu and method != "fp8":
            if method == "int4" and field != HEAD_FIELD:
                weight = round_to_affine_grid(projection.weight, group_size=_GROUP_SIZE)
            else:
                weight = round_to_grid(projection.weight, bits=8, group_size=_GROUP_SIZE)
            return GroupedLinear(weight, projection.bias)
        if field == HEAD_FIELD:
            return projection
        return Fp8Linear(projection) if method == "fp8" else Int8Linear(projection)

    return convert


def widen_weights(weights: DecoderWeights, convert: Callable[[Linear, int], Projection]) -> None:
    """Replace grouped projections by `convert(linear, span)` of their values in the model's dtype. Mutates `weights`.

    Kernels for the groups would take inputs with a scale for each `span` of them.

    For where no kernel takes groups: they then take the memory of a plain checkpoint, and no step widens them again.
    """
    dtype = weights.embedding.dtype
    if any(isinstance(projection, GroupedLinear) for projection in weights.projections()):
        logger.warning("weights in groups are widened to %s: no kernel here takes them as they are", dtype)

    def widened(projection: Projection) -> Projection:
        if not isinstance(projection, GroupedLinear):
            return projection
        weight = projection.weight
        return convert(projection.dequantize(dtype), input_span(weight.group_size, weight.shape[1]))

    weights.replace_projections(widened)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows:
    """Inputs of a projection in 8 bits."""

    values: Tensor
    """e4m3 [num_tokens, num_features]."""
    scales: Tensor
    """float32 [num_tokens, 1], which restore the rows."""
    dtype: torch.dtype
    """Dtype in which they were computed."""


class Fp8Linear:
    """Weights e4m3 [out_features, in_features] with a float32 scale per row; a `Projection`."""

    def __init__(self, linear: Linear) -> None:
        """Quantize a projection; keeps its bias."""
        scale = _row_scales(linear.weight, FP8_MAX)
        weight = (linear.weight.float() / scale).to(FP8)
        self.scale = scale
        """Float32 [out_features, 1]."""
        self.bias = linear.bias
        self._is_fast = weight.device.type == "cuda"
        # e4m3 is a subset of bfloat16: widening it once, for hardware that cannot multiply it, changes no result.
        wide = torch.bfloat16 if linear.weight.dtype is torch.bfloat16 else torch.float32
        self.weight = weight if self._is_fast else weight.to(wide)

    @property
    def num_bytes(self) -> int:
        """See `Projection`."""
        return self.weight.nbytes

    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features], in x's dtype."""
        rows, scales = self._round(x) if isinstance(x, Tensor) else (x.values, x.scales)
        if self._is_fast:
            # Without fast accumulation, so that quality measured on a CPU holds here.
            product = torch._scaled_mm(  # noqa: SLF001 - its only name
                rows, self.weight.t(), scale_a=scales, scale_b=self.scale.t(), out_dtype=torch.bfloat16
            ).to(x.dtype)
        else:
            wide = F.linear(rows.to(self.weight.dtype), self.weight)
            product = (wide.float() * scales * self.scale.t()).to(x.dtype)
        return product if self.bias is None else product.add_(self.bias)

    def _round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self._is_fast:
            return quantize_rows_in_torch(x)
        from engine.weights.kernels import quantize_rows

        return quantize_rows(x)


class Int8Linear:
    """Weights int8 [out_features, in_features] with a scale per row, in the activations' dtype; a `Projection`.

    For GPUs; elsewhere it computes the same with torch.
    """

    def __init__(self, linear: Linear) -> None:
        """Quantize a projection; keeps its bias."""
        # The scale is rounded before the weights are divided by it: its own error cancels.
        self.scale = _row_scales(linear.weight, _INT8_MAX).to(linear.weight.dtype)
        """Scale of each row, [out_features, 1], in the weights' dtype."""
        rounded = (linear.weight.float() / self.scale.float()).round_()
        self.weight = rounded.clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
        self.bias = linear.bias
        self._is_cuda = self.weight.device.type == "cuda"

    @property
    def num_bytes(self) -> int:
        """See `Projection`."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features], in x's dtype."""
        if self._is_cuda and x.shape[0] <= _CUDA_INT8_ROWS:
            from engine.weights.kernels import int8_linear

            product = int8_linear(x, self.weight, self.scale)
        else:
            product = F.linear(x, self.weight.to(x.dtype)) * self.scale.t()
        return product if self.bias is None else product.add_(self.bias)


def quantize_rows_in_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [num_tokens, num_features] as e4m3 and the float32 scales [num_tokens, 1] that restore it."""
    scales = _row_scales(x, FP8_MAX)
    return (x.float() / scales).to(FP8), scales


def round_to_fp8(x: Tensor, scale: float) -> Tensor:
    """Return x, in its dtype, as it is read back from e4m3 pages with this scale (a power of two)."""
    return ((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale).to(x.dtype)


def kv_scales(weights: DecoderWeights, config: DecoderConfig) -> tuple[tuple[float, float], ...]:
    """Return the factors of each layer's stored keys and values, both powers of two.

    Needs weights as they were loaded, or in 8 bits: call it before they are packed.
    """
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    scales = []
    for layer in weights.layers:
        qkv = layer.qkv
        if isinstance(qkv, Fp8Linear | Int8Linear):
            values = qkv.weight.float() * qkv.scale.float()
        elif isinstance(qkv, GroupedLinear):
            values = qkv.weight.dequantize(torch.float32)
        else:
            qkv = plain(qkv)
            values = qkv.weight.float()
        # After RMSNorm a feature has its weight as deviation, and a projection's output has the norm of its row.
        deviations = (values * layer.input_norm.float()).square().sum(1)
        if qkv.bias is not None:
            deviations += qkv.bias.float().square()
        deviations.sqrt_()
        keys = deviations[q_size : q_size + kv_size] if layer.k_norm is None else layer.k_norm.float().abs()
        scales.append((_kv_scale(keys), _kv_scale(deviations[q_size + kv_size :])))
    return tuple(scales)


def _kv_scale(deviations: Tensor) -> float:
    largest = float(deviations.max()) * _KV_HEADROOM
    # Rounding makes machines that differ in the last bit of a sum agree on the scale.
    return 2.0 ** round(math.log2(largest / FP8_MAX)) if largest > 0 else 1.0


def _row_scales(x: Tensor, largest: float) -> Tensor:
    """Return the float32 scales [num_rows, 1] that map each row's largest magnitude to `largest`."""
    magnitudes = x.abs().amax(dim=1, keepdim=True).float()
    return (magnitudes / largest).clamp_min(torch.finfo(torch.float32).tiny)

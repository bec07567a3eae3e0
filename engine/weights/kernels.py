"""Triton kernels for 8-bit weights."""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.device.interpreter import dot_dtype

_FP8_MAX = tl.constexpr(448.0)
_TINY = tl.constexpr(1.1754943508222875e-38)  # as in engine.weights.quantize: a row of zeros has a scale too

_INT8_BLOCK_IN = 128
_MIN_DOT_ROWS, _MAX_DOT_ROWS = 16, 128
_FEW_ROWS = 64


@triton.jit
def _quantize_rows(x, rows, scales, x_stride, num_features, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK)
    inside = features < num_features
    values = tl.load(x + row * x_stride + features, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) / _FP8_MAX, _TINY)
    tl.store(scales + row, scale)
    # Division may round the largest value above the maximum, which e4m3 cannot represent.
    quantized = tl.minimum(tl.maximum(values / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(rows + row * num_features + features, quantized.to(tl.float8e4nv), mask=inside)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [num_tokens, num_features] as e4m3 and the float32 scales [num_tokens, 1] that restore it.

    Rows are contiguous; one program per row, which is read once.
    """
    num_tokens, num_features = x.shape
    rows = torch.empty((num_tokens, num_features), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(num_features)
    num_warps = min(16, max(1, block // 512))
    _quantize_rows[(num_tokens,)](x, rows, scales, x.stride(0), num_features, BLOCK=block, num_warps=num_warps)
    return rows, scales


@triton.jit(do_not_specialize=["num_tokens"])  # else 1, multiples of 16 and other values are compiled separately
def _int8_linear(
    x,
    weight,
    scale,
    output,
    num_tokens,
    num_out,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.arange(0, BLOCK_IN)
    has_token = tokens < num_tokens
    has_out = outs < num_out
    x_rows = x + tokens[:, None].to(tl.int64) * x_stride
    weight_rows = weight + outs[:, None].to(tl.int64) * num_in
    sums = tl.zeros((ROWS, BLOCK_OUT), dtype=tl.float32)
    for first in range(0, num_in, BLOCK_IN):
        has_in = first + ins < num_in
        features = tl.load(x_rows + first + ins[None, :], mask=has_token[:, None] & has_in[None, :], other=0.0)
        weights = tl.load(weight_rows + first + ins[None, :], mask=has_out[:, None] & has_in[None, :], other=0)
        # -127 … 127 are exact in every dtype of activations.
        sums = tl.dot(features.to(DOT_DTYPE), tl.trans(weights.to(DOT_DTYPE)), sums, input_precision="ieee")
    scales = tl.load(scale + outs, mask=has_out, other=0.0).to(tl.float32)
    result = (sums * scales[None, :]).to(output.dtype.element_ty)
    at = output + tokens[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(at, result, mask=has_token[:, None] & has_out[None, :])


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ (weight * scale).T, [num_tokens, num_out] in x's dtype.

    x [num_tokens, num_in] with contiguous rows, weight int8 [num_out, num_in] contiguous, scale [num_out, 1]. Each
    program reads its rows of the weights once, for up to 128 tokens; those of the next tokens run beside it, and find
    them in the cache.
    """
    num_tokens, num_in = x.shape
    num_out = weight.shape[0]
    output = torch.empty((num_tokens, num_out), dtype=x.dtype, device=x.device)
    block_rows = min(_MAX_DOT_ROWS, max(_MIN_DOT_ROWS, triton.next_power_of_2(num_tokens)))
    is_large = block_rows > _FEW_ROWS
    block_out = 64 if is_large else 32
    _int8_linear[(triton.cdiv(num_tokens, block_rows), triton.cdiv(num_out, block_out))](
        x,
        weight,
        scale,
        output,
        num_tokens,
        num_out,
        num_in,
        x.stride(0),
        ROWS=block_rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=_INT8_BLOCK_IN,
        DOT_DTYPE=dot_dtype(x.dtype),
        num_warps=8 if is_large else 4,
        num_stages=3 if is_large else 4,
    )
    return output

"""Root-mean-square norm of rows, alone or after the addition to the residual stream, and the gate of a gated MLP.

Each also rounds its rows to 8 bits for projections that multiply these, as `engine.weights.kernels.quantize_rows` does.
"""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.weights.architectures import Activation
from engine.weights.quantize import Fp8Rows

_FP8_MAX = tl.constexpr(448.0)
_TINY = tl.constexpr(1.1754943508222875e-38)  # as in engine.weights.quantize: a row of zeros has a scale too


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight for contiguous x [num_rows, size]; the mean square is taken in float32."""
    return _launch(x, None, weight, eps)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """Return `rms_norm` in 8 bits."""
    return _launch_fp8(x, None, weight, eps)


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """Return `add_rms_norm` in 8 bits."""
    return _launch_fp8(x, residual, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place and return the sum's norm, as `rms_norm` does; all contiguous [num_rows, size]."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    output = torch.empty_like(x)
    _run_norm(output, None, x, residual, weight, eps)
    return output


def _launch_fp8(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Fp8Rows:
    rows = _empty_fp8(*x.shape, like=x)
    _run_norm(rows.values, rows.scales, x, residual, weight, eps)
    return rows


def _empty_fp8(num_rows: int, size: int, *, like: Tensor) -> Fp8Rows:
    values = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=like.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=like.device)
    return Fp8Rows(values=values, scales=scales, dtype=like.dtype)


def _run_norm(
    output: Tensor, scales: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> None:
    num_rows, size = x.shape
    block = triton.next_power_of_2(size)
    num_warps = min(max(block // 512, 2), 16)  # up to 16 elements, two vector loads, per thread
    _rms_norm_kernel[(num_rows,)](output, scales, x, residual, weight, eps, SIZE=size, BLOCK=block, num_warps=num_warps)


@triton.jit
def _store_fp8(values_ptr, scale_ptr, values, exists):
    """Store a row, float32, in 8 bits, and its scale. Missing values are 0."""
    scale = tl.maximum(tl.max(tl.abs(values), 0) / _FP8_MAX, _TINY)
    tl.store(scale_ptr, scale)
    # Division may round the largest value above the maximum, which e4m3 cannot represent.
    quantized = tl.minimum(tl.maximum(values / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(values_ptr, quantized.to(tl.float8e4nv), mask=exists)


@triton.jit
def _rms_norm_kernel(
    output_ptr, scales_ptr, x_ptr, residual_ptr, weight_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    exists = columns < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    weight = tl.load(weight_ptr + columns, mask=exists, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(residual_ptr + offsets, rounded, mask=exists)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    # Rounded before the weight too, like most checkpoints' own implementations.
    normed = (x * scale).to(dtype).to(tl.float32) * weight
    if scales_ptr is not None:
        rounded = tl.where(exists, normed.to(dtype).to(tl.float32), 0.0)
        _store_fp8(output_ptr + offsets, scales_ptr + tl.program_id(0), rounded, exists)
    else:
        tl.store(output_ptr + offsets, normed.to(dtype), mask=exists)


_BLOCK = 1024
"""Elements per program: with four warps, one 16-byte vector of each operand per thread."""


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return f(gate) * up, [num_rows, size], of contiguous gate_up [num_rows, 2 * size] and an activation f."""
    num_rows, width = gate_up.shape
    size = width // 2
    output = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _gate_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        output, gate_up, IS_GELU=activation is Activation.GELU_TANH, SIZE=size, BLOCK=_BLOCK, num_warps=4
    )
    return output


@triton.jit
def _activate(x, IS_GELU: tl.constexpr):
    if IS_GELU:  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
        return x * tl.sigmoid(x * (x * x * 0.0713548163 + 1.59576912))
    return x * tl.sigmoid(x)


@triton.jit
def _gate_mul_kernel(output_ptr, gate_up_ptr, IS_GELU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < SIZE
    gate_ptr = gate_up_ptr + row * (2 * SIZE) + columns
    gate = tl.load(gate_ptr, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=exists, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    activated = _activate(gate, IS_GELU).to(dtype).to(tl.float32)  # rounded like two operations
    tl.store(output_ptr + row * SIZE + columns, (activated * up).to(dtype), mask=exists)


def gate_mul_fp8(gate_up: Tensor, activation: Activation) -> Fp8Rows:
    """Return `gate_mul` in 8 bits; a program takes a row, as its scale depends on all of it."""
    num_rows, width = gate_up.shape
    size = width // 2
    rows = _empty_fp8(num_rows, size, like=gate_up)
    block = triton.next_power_of_2(size)
    num_warps = min(max(block // 512, 1), 16)
    is_gelu = activation is Activation.GELU_TANH
    _gate_mul_fp8_kernel[(num_rows,)](
        rows.values, rows.scales, gate_up, IS_GELU=is_gelu, SIZE=size, BLOCK=block, num_warps=num_warps
    )
    return rows


@triton.jit
def _gate_mul_fp8_kernel(
    values_ptr, scales_ptr, gate_up_ptr, IS_GELU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < SIZE
    gate_ptr = gate_up_ptr + row * (2 * SIZE) + columns
    gate = tl.load(gate_ptr, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=exists, other=0.0).to(tl.float32)
    dtype = gate_up_ptr.dtype.element_ty
    activated = _activate(gate, IS_GELU).to(dtype).to(tl.float32)  # rounded like two operations
    product = (activated * up).to(dtype).to(tl.float32)
    _store_fp8(values_ptr + row * SIZE + columns, scales_ptr + row, product, exists)

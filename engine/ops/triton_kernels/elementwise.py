"""Root-mean-square norm of rows, alone or after the addition to the residual stream, and the gate of a gated MLP."""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight for contiguous x [num_rows, size]; the mean square is taken in float32."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place and return the sum's norm, as `rms_norm` does; all contiguous [num_rows, size]."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, size = x.shape
    output = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    num_warps = min(max(block // 512, 2), 16)  # up to 16 elements, two vector loads, per thread
    _rms_norm_kernel[(num_rows,)](output, x, residual, weight, eps, SIZE=size, BLOCK=block, num_warps=num_warps)
    return output


@triton.jit
def _rms_norm_kernel(output_ptr, x_ptr, residual_ptr, weight_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    exists = columns < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    weight = tl.load(weight_ptr + columns, mask=exists, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(residual_ptr + offsets, rounded, mask=exists)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    # Rounded before the weight too, like the checkpoints' own implementations.
    normed = (x * scale).to(dtype).to(tl.float32) * weight
    tl.store(output_ptr + offsets, normed.to(dtype), mask=exists)


_BLOCK = 1024
"""Elements per program: with four warps, one 16-byte vector of each operand per thread."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [num_rows, size], of contiguous gate_up [num_rows, 2 * size]."""
    num_rows, width = gate_up.shape
    size = width // 2
    output = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](output, gate_up, SIZE=size, BLOCK=_BLOCK, num_warps=4)
    return output


@triton.jit
def _silu_mul_kernel(output_ptr, gate_up_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < SIZE
    gate_ptr = gate_up_ptr + row * (2 * SIZE) + columns
    gate = tl.load(gate_ptr, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=exists, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)  # rounded like two operations
    tl.store(output_ptr + row * SIZE + columns, (activated * up).to(dtype), mask=exists)

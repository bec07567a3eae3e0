"""The gate of a gated MLP."""
# ruff: noqa: ANN001, ANN202 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""With four warps a thread has one 16-byte vector of each operand."""


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
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)  # rounded as by two operations
    tl.store(output_ptr + row * SIZE + columns, (activated * up).to(dtype), mask=exists)

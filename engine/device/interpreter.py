"""Triton's interpreter, which runs kernels without a device, and what it cannot multiply."""
# mypy: disable-error-code="import-untyped"

import torch
import triton
import triton.language as tl


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, that is, TRITON_INTERPRET was set before the import."""
    return bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of matrix products: the queries' dtype, or float32 in the interpreter."""
    if is_interpreted():
        return tl.float32  # its bfloat16 is a bit pattern
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]

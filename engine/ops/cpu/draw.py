"""The compiled choice of tokens."""

import ctypes

import torch
from torch import Tensor

from engine.ops.cpu.library import CpuKernels, Draws
from engine.sampling.draw import Draw, DrawKernel


def compiled_draw(kernels: CpuKernels) -> DrawKernel:
    """Return the kernel for logits in host memory; draw.h says how exact it is."""

    def choose(draw: Draw) -> Tensor:
        min_p = torch.zeros_like(draw.top_p) if draw.min_p is None else draw.min_p
        columns = (draw.logits, draw.peak, draw.temperature, draw.top_k, draw.top_p, min_p, draw.keys)
        inputs = [column.contiguous() for column in columns]
        token_ids = torch.empty(len(draw.logits), dtype=torch.int64)
        kernels.use_threads(torch.get_num_threads())
        addresses = [each.data_ptr() for each in (*inputs, token_ids)]
        kernels.draw(ctypes.byref(Draws(*addresses, *draw.logits.shape)))
        return token_ids

    return choose

"""The compiled choice of tokens, against torch's."""

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import EngineFault
from engine.executor import Sampled
from engine.ops.cpu.draw import compiled_draw
from engine.ops.cpu.library import CpuKernels
from engine.sampling.draw import DrawKernel
from engine.sampling.logits import SamplingRow
from engine.sampling.sampler import Sampler
from tests.engine.sampling_rows import make_row

NUM_DRAWS = 48
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda normal: normal / 10,
    "usual": lambda normal: 3 * normal,
    "peaked": lambda normal: normal**3,
    "tied": lambda normal: (2 * normal).round(),  # with zeros of both signs
    "masked": lambda normal: normal.masked_fill(normal < normal.amax(dim=-1, keepdim=True) - 1, -torch.inf),
}


@pytest.fixture
def compiled(float32_kernels: CpuKernels) -> DrawKernel:
    return compiled_draw(float32_kernels)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 511, 512, 513, 2049, 49152])
def test_compiled_draws_choose_the_tokens_that_torch_chooses(compiled: DrawKernel, vocab_size: int, shape: str) -> None:
    temperatures, min_p = (1e-40, 1e-4, 0.3, 0.7, 1.0, 3.0, 1000.0), (0.0, 0.0, 0.01, 0.3, 1.0)
    top_p = (1e-12, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0)
    top_k = (0, 1, 2, 40, 1024, vocab_size, vocab_size // 2, 2**31 - 1)
    filters = random.Random(vocab_size).sample(list(product(temperatures, top_p, top_k, min_p)), NUM_DRAWS)
    rows = [
        make_row(seed=i, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        for i, (temperature, top_p, top_k, min_p) in enumerate(filters)
    ]
    normal = torch.randn(NUM_DRAWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits = SHAPES[shape](normal)
    assert _sample(logits, rows, compiled) == _sample(logits, rows, None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_compiled_draws_refuse_logits_without_a_finite_maximum(
    compiled: DrawKernel, bad: float, filters: dict[str, Any]
) -> None:
    logits = torch.randn(2, 600)
    logits[1, slice(None) if bad == -torch.inf else 7] = bad
    with pytest.raises(EngineFault, match="row 1 "):
        _sample(logits, [make_row(**filters)] * 2, compiled)


def test_compiled_draws_in_a_mixed_batch_choose_the_same_tokens(compiled: DrawKernel) -> None:
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": ((9, 30.0),)},
        {"temperature": 2.0, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 0.7, "top_p": 0.95, "logit_bias": ((5, 3.0),)},
        {"temperature": 1.5, "presence_penalty": 1.0},
    ]
    rows = [make_row(sample_index=i, token_index=11 + i, seed=i, **params) for i, params in enumerate(sampling)]
    rows += [make_row(seed=9, tested=3), make_row(seed=9, tested=3, top_k=20, top_p=0.9)]
    logits = torch.randn(len(rows), 640)
    assert _sample(logits, rows, compiled) == _sample(logits, rows, None)


def _sample(logits: Tensor, rows: list[SamplingRow], draw_kernel: DrawKernel | None) -> list[Sampled]:
    sampler = Sampler(vocab_size=logits.shape[1], eos_token_ids=frozenset(), draw_kernel=draw_kernel)
    return sampler.sample(logits, rows)

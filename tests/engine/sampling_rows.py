"""Rows for the sampler, and random logits."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.sampling import SamplingParams
from engine.sampling.logits import SamplingRow
from engine.sampling.sampler import Sampler

EOS = frozenset({2})
F32 = npt.NDArray[np.float32]


def make_row(
    *,
    token_index: int = 0,
    sample_index: int = 0,
    prompt: tuple[int, ...] = (5, 6, 7),
    output: tuple[int, ...] = (),
    tested: int = -1,
    **params: Any,
) -> SamplingRow:
    """Return a row with these parameters behind a prompt and what is already there of its answer."""
    return SamplingRow(
        params=SamplingParams(**params),
        sample_index=sample_index,
        token_index=token_index,
        prompt_token_ids=prompt,
        output_token_ids=output,
        tested=tested,
    )


def make_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 2.5) -> F32:
    """Return normally distributed logits [num_rows, vocab_size]."""
    return np.random.default_rng(seed).normal(size=(num_rows, vocab_size), scale=scale).astype(np.float32)


def sample_ids(logits: F32, rows: list[SamplingRow]) -> list[int]:
    """Return the token that a fresh sampler draws for each row."""
    sampler = Sampler(vocab_size=logits.shape[1], eos_token_ids=EOS)
    return [sampled.token_id for sampled in sampler.sample(torch.from_numpy(logits), rows)]

"""Draws over token indices, sample indices and seeds follow the exact shaped distribution."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from common.sampling import SamplingParams
from engine.sampler import Sampler, SamplingRow
from tests.engine.sampling_reference import distribution

NUM_DRAWS = 6000
EOS = frozenset({0})

torch.set_num_threads(1)


def draw(logits: np.ndarray[Any, np.dtype[np.float32]], rows: list[SamplingRow]) -> list[int]:
    repeated = torch.from_numpy(logits).expand(len(rows), -1)
    return [s.token_id for s in Sampler(vocab_size=len(logits), eos_token_ids=EOS).sample(repeated, rows)]


def make_row(token_index: int, *, sample_index: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**{"seed": 2024, "max_tokens": 10**6, **params}),
        sample_index=sample_index,
        token_index=token_index,
        prompt_token_ids=(3, 4, 4),
        output_token_ids=(5, 5, 6),
    )


def assert_follows(tokens: list[int], probabilities: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * len(tokens)
    rare = expected < 5  # chi-square wants at least 5 in a class: the rare ones form one
    observed = np.append(counts[possible][~rare], counts[possible][rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    assert stats.chisquare(observed[kept], expected[kept]).pvalue > 1e-3


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.1, "frequency_penalty": 0.6},
        {"logit_bias": ((1, 2.0), (8, -3.0))},
        {"min_tokens": 10**6},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["token_index", "sample_index", "seed"])
def test_draws_over_one_index_follow_the_shaped_distribution(params: dict[str, Any], vary: str) -> None:
    logits = np.random.default_rng(1).normal(size=24, scale=1.5).astype(np.float32)
    rows = {
        "token_index": [make_row(i, **params) for i in range(NUM_DRAWS)],
        "sample_index": [make_row(0, sample_index=i, **params) for i in range(NUM_DRAWS)],
        "seed": [make_row(0, seed=i, **params) for i in range(NUM_DRAWS)],
    }[vary]
    assert_follows(draw(logits, rows), distribution(logits, rows[0], EOS))


@pytest.mark.parametrize("other", [{"sample_index": 1}, {"seed": 2025}], ids=str)
def test_draws_of_two_samples_or_two_seeds_are_independent(other: dict[str, Any]) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    first = draw(logits, [make_row(i) for i in range(NUM_DRAWS)])
    second = draw(logits, [make_row(i, **other) for i in range(NUM_DRAWS)])
    table = np.zeros((4, 4))
    np.add.at(table, (first, second), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_draws_when_logits_move_a_little_change_only_near_the_boundaries() -> None:
    logits = np.random.default_rng(3).normal(size=500).astype(np.float32)
    moved = logits + np.random.default_rng(4).normal(size=500, scale=1e-6).astype(np.float32)
    rows = [make_row(i) for i in range(NUM_DRAWS)]
    changed = [(a, b) for a, b in zip(draw(logits, rows), draw(moved, rows), strict=True) if a != b]
    assert len(changed) < 10
    assert all(abs(a - b) == 1 for a, b in changed)

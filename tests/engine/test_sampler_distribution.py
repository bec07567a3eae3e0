"""Noise and the draws made from it: known answers, independence, and the exact shaped distribution."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from engine.sampling.logits import SamplingRow
from engine.sampling.noise import noise_key, noise_keys, philox_4x32
from engine.sampling.sampler import Sampler
from tests.engine.sampling_reference import distribution
from tests.engine.sampling_rows import make_row

NUM_DRAWS = 3000
EOS = frozenset({0})


def draw(logits: np.ndarray[Any, np.dtype[np.float32]], rows: list[SamplingRow]) -> list[int]:
    repeated = torch.from_numpy(logits).expand(len(rows), -1)
    return [s.token_id for s in Sampler(vocab_size=len(logits), eos_token_ids=EOS).sample(repeated, rows)]


def row_at(token_index: int, **fields: Any) -> SamplingRow:
    fields = {"seed": 2024, "max_tokens": 10**6, "prompt": (3, 4, 4), "output": (5, 5, 6), **fields}
    return make_row(token_index=token_index, **fields)


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


# That every parameter shapes the distribution as it should is for test_sampler.py, token by token.
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 3.0},
    {"min_p": 0.15},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
]


# The index only chooses the noise, which no parameter sees: one index with all of them, the others with none and many.
@pytest.mark.parametrize(
    ("params", "vary"),
    [
        *((params, "token_index") for params in PARAMS),
        *((params, vary) for vary in ("sample_index", "seed") for params in (PARAMS[0], PARAMS[-1])),
    ],
    ids=str,
)
def test_draws_over_one_index_follow_the_shaped_distribution(params: dict[str, Any], vary: str) -> None:
    logits = np.random.default_rng(1).normal(size=24, scale=1.5).astype(np.float32)
    rows = {
        "token_index": [row_at(i, **params) for i in range(NUM_DRAWS)],
        "sample_index": [row_at(0, sample_index=i, **params) for i in range(NUM_DRAWS)],
        "seed": [row_at(0, seed=i, **params) for i in range(NUM_DRAWS)],
    }[vary]
    assert_follows(draw(logits, rows), distribution(logits, rows[0], EOS))


@pytest.mark.parametrize("other", [{"sample_index": 1}, {"seed": 2025}], ids=str)
def test_draws_of_two_samples_or_two_seeds_are_independent(other: dict[str, Any]) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    first = draw(logits, [row_at(i) for i in range(NUM_DRAWS)])
    second = draw(logits, [row_at(i, **other) for i in range(NUM_DRAWS)])
    table = np.zeros((4, 4))
    np.add.at(table, (first, second), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


U64 = st.integers(0, 2**64 - 1)

# Random123's published vectors for philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_on_published_vectors_gives_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox_4x32(counter, key) == expected


@given(st.lists(st.tuples(U64, U64, U64), min_size=1, max_size=8))
def test_noise_keys_on_any_triples_equals_noise_key_bit_for_bit(triples: list[tuple[int, int, int]]) -> None:
    seeds, samples, tokens = zip(*triples, strict=True)
    assert noise_keys(seeds, samples, tokens).tolist() == [noise_key(*triple) for triple in triples]


@pytest.mark.parametrize("vary", ["seed", "sample_index", "token_index"])
def test_noise_key_over_consecutive_inputs_is_uniform_and_uncorrelated(vary: str) -> None:
    values = np.array(
        [noise_key(**{"seed": 7, "sample_index": 3, "token_index": 11} | {vary: index}) for index in range(4000)]
    ).astype(np.float64)
    assert stats.kstest(values / 2.0**64, "uniform").pvalue > 1e-3
    for lag in (1, 2, 3):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.06

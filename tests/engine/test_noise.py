"""engine.noise: known answers, agreement of the scalar and the vector form, independence of the three inputs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from engine.noise import noise_key, noise_keys, philox_4x32

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


@given(U64, U64, U64)
def test_noise_key_on_any_triple_has_64_bits(seed: int, sample: int, token: int) -> None:
    assert 0 <= noise_key(seed, sample, token) < 2**64


@pytest.mark.parametrize("vary", ["seed", "sample_index", "token_index"])
def test_noise_key_over_consecutive_inputs_is_uniform_and_uncorrelated(vary: str) -> None:
    values = np.array(
        [noise_key(**{"seed": 7, "sample_index": 3, "token_index": 11} | {vary: index}) for index in range(4000)]
    ).astype(np.float64)
    assert stats.kstest(values / 2.0**64, "uniform").pvalue > 1e-3
    for lag in (1, 2, 3):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.06


def test_noise_key_when_two_inputs_are_swapped_gives_another_number() -> None:
    triples = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2)]
    assert len({noise_key(*triple) for triple in triples}) == 5

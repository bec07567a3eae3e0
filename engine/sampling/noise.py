"""Sampling noise as a pure function of (seed, sample index, token index). No generator, no state, no torch.

The function is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten
rounds turn a 128-bit counter and a 64-bit key into 128 well-mixed bits. Key: the request's seed. Counter: (token index,
sample index). So any worker draws the same token, in any batch.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# A 32-bit word: a Python int, or a uint64 array with one word per row (times an int, NumPy types it as signed).
Words: TypeAlias = Any

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK_32 = 0xFFFFFFFF


def noise_key(seed: int, sample_index: int, token_index: int) -> int:
    """Return the key of one draw, 64 random bits. The arguments are unsigned integers of at most 64 bits."""
    high, low, _, _ = philox_4x32(_split(token_index) + _split(sample_index), _split(seed))
    key: int = (high << 32) | low
    return key


def noise_keys(
    seeds: Sequence[int], sample_indices: Sequence[int], token_indices: Sequence[int]
) -> npt.NDArray[np.uint64]:
    """Return `noise_key` of each triple, uint64 [len(seeds)]."""
    seed, sample, token = (np.array(column, dtype=np.uint64) for column in (seeds, sample_indices, token_indices))
    high, low, _, _ = philox_4x32(_split(token) + _split(sample), _split(seed))
    keys: npt.NDArray[np.uint64] = (high << 32) | low
    return keys


def philox_4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Return the four 32-bit output words for a counter and a key of 32-bit words, least significant first.

    Nothing overflows 64 bits, the width of a product of two words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK_32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK_32,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK_32, (k1 + _WEYL_1) & _MASK_32
    return c0, c1, c2, c3


def _split(value: Words) -> tuple[Words, Words]:
    """Return the low and the high 32 bits."""
    return value & _MASK_32, value >> 32

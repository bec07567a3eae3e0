"""Packed token ids: neither event loop nor engine thread creates an object for each token of a prompt.

`TokenArray` is an `array` of uint32. It appends and slices cheaply, compares and iterates like a list of ints, and
NumPy reads it in place. Arrays in records never change; only `engine.sequence.Sequence` appends to its own.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = "array[int]"

TOKEN_BYTES = 4
"""Size of a packed id: little-endian, like all supported machines."""

if array("I").itemsize != TOKEN_BYTES:
    raise ImportError(
        f"array('I') has {array('I').itemsize} bytes an item on this platform; token ids need {TOKEN_BYTES}"
    )


def num_packed(raw: "bytes | memoryview") -> int:
    """Return the number of packed ids."""
    return len(raw) // TOKEN_BYTES


def as_tokens(ids: Iterable[int]) -> TokenArray:
    """Return ids (below 2**32) as a new packed array."""
    if isinstance(ids, bytes):  # the constructor would read them as packed ids
        ids = np.frombuffer(ids, dtype=np.uint8)
    if isinstance(ids, np.ndarray):
        return tokens_from_bytes(ids.astype("<u4").tobytes())
    return array("I", ids)


def tokens_from_bytes(raw: "bytes | memoryview") -> TokenArray:
    """Return packed ids; the length of `raw` is a multiple of 4."""
    tokens = array("I")
    tokens.frombytes(raw)
    return tokens


def token_view(tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return ids as uint32 [num_tokens]: a copy, or a view of packed ids, whose array cannot grow meanwhile."""
    return np.frombuffer(tokens, dtype=np.uint32) if isinstance(tokens, array) else np.array(tokens, dtype=np.uint32)

"""Token ids, packed: nothing on the event loop or the engine thread makes an object of each token of a prompt.

`TokenArray` is an `array` of uint32. It appends and slices cheaply, compares and iterates like a list of ints, and
NumPy reads it in place. What a record holds is never changed; only `engine.sequence.Sequence` appends to its own.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = "array[int]"

TOKEN_BYTES = 4
"""Of a packed id: little-endian, as all machines are that we run on."""

if array("I").itemsize != TOKEN_BYTES:
    raise ImportError(
        f"array('I') has {array('I').itemsize} bytes an item on this platform; token ids need {TOKEN_BYTES}"
    )


def as_tokens(ids: Iterable[int]) -> TokenArray:
    """Return ids (below 2**32) packed; a new array, whatever is given."""
    if isinstance(ids, bytes):  # the constructor would take them for packed ids
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
    """Return ids as uint32 [num_tokens], without a copy if they are packed. While such a view lives, its array cannot
    grow.
    """
    return np.frombuffer(tokens, dtype=np.uint32) if isinstance(tokens, array) else np.array(tokens, dtype=np.uint32)

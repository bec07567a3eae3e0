"""Ends numbers that a grammar of JSON would let go on forever.

Behind MAX_DIGITS digits in a row no token that begins with a digit may follow, where any other may: the whole part, the
fraction and the exponent of a number are bounded, each by itself. A string's digits are counted, too.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tokenizers

MAX_DIGITS = 100
"""Most digits in a row, up to the rest of a token."""
_DIGIT = re.compile(r"[0-9]|<0x3[0-9]>")
_LAST_DIGITS = re.compile(r"(?:[0-9]|<0x3[0-9]>)+$")

Mask = npt.NDArray[np.bool_]


class DigitRuns:
    """The digits in the tokens of one vocabulary. Immutable."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, vocab_size: int) -> None:
        self._is_other: Mask = np.ones(vocab_size, dtype=np.bool_)
        """Whether a token begins with something else than a digit."""
        self._num_last: dict[int, int] = {}
        """Digits with which a token ends, of those that end so."""
        self._are_digits: set[int] = set()
        """Tokens of digits alone."""
        for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
            last = _LAST_DIGITS.search(token)
            if last is not None:
                self._num_last[token_id] = len(_DIGIT.findall(last[0]))
                if last.start() == 0:
                    self._are_digits.add(token_id)
            if _DIGIT.match(token) and token_id < vocab_size:
                self._is_other[token_id] = False

    def after(self, num_digits: int, token_ids: Sequence[int]) -> int:
        """Return how many digits an answer ends with that ended with so many before the tokens."""
        for token_id in token_ids:
            last = self._num_last.get(token_id, 0)
            num_digits = num_digits + last if token_id in self._are_digits else last
        return num_digits

    def may_bound(self, num_digits: int, token_ids: Sequence[int]) -> bool:
        """Return whether a run of digits may become too long within tokens."""
        return num_digits + sum(self._num_last.get(token_id, 0) for token_id in token_ids) >= MAX_DIGITS

    def bounded(self, allowed: Mask, num_digits: int) -> Mask:
        """Return the tokens of a mask that may follow so many digits."""
        if num_digits < MAX_DIGITS:
            return allowed
        others = allowed & self._is_other
        return others if others.any() else allowed

"""The declaration of one sampling parameter, and the check of a value by it; common/sampling.py has all of them."""

import math
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequest

# Types of parameters.
Texts = tuple[str, ...]
Tokens = frozenset[int]
"""A set: looked up for every token of every sample."""
Biases = tuple[tuple[int, float], ...]
"""A number for each of some tokens."""
Json = str
"""The text of a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Declaration of one sampling parameter."""

    name: str
    """Field of `SamplingParams`."""
    option: str
    """Name on the wire, in both APIs and in errors."""
    type: Any
    """Type of the value: float, int, bool, `Texts`, `Tokens`, `Biases` or `Json`."""
    default: Any
    documented_default: str | None = None
    """The default in words, where it is not a value."""
    meaning: str
    least: float | None = None
    """Smallest number, bias, or length of a string."""
    most: float | None = None
    is_open: bool = False
    """`least` itself is not allowed."""
    max_entries: int | None = None

    @property
    def allowed(self) -> str:
        """The allowed values in words; empty when every value is allowed."""
        entries = "" if self.max_entries is None else f"at most {self.max_entries}"
        if self.least is None or self.most is None:
            return entries
        values = f"{self.least} to {self.most}"
        if self.is_open:
            values = f"more than {self.least}, at most {self.most}"
        if self.type in (Texts, Json):
            values += " characters"
        return f"{entries}, each {values}" if entries else values

    def check(self, value: Any, *, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the option, unless the value is allowed."""
        if self.type in (float, int):
            if value is not None:
                self._check_number(value)
        elif self.type == Json:
            self._check_number(len(value), fault=f"has {len(value)} characters")
        elif self.max_entries is not None:
            if len(value) > self.max_entries:
                raise self._refusal(f"has {len(value)} entries")
            for entry in value:
                self._check_entry(entry, vocab_size)

    def _check_entry(self, entry: Any, vocab_size: int) -> None:
        if self.type == Texts:
            self._check_number(len(entry), fault=f"has an entry of {len(entry)} characters")
            return
        token_id, bias = entry if self.type == Biases else (entry, None)
        if not 0 <= token_id < vocab_size:
            message = f"{self.option}: token {token_id} is not in the vocabulary of {vocab_size}"
            raise InvalidRequest(message, field=f"sampling.{self.option}")
        if bias is not None:
            self._check_number(bias)

    def _check_number(self, value: float, *, fault: str | None = None) -> None:
        assert self.least is not None
        assert self.most is not None
        is_enough = value > self.least if self.is_open else value >= self.least
        if not math.isfinite(value) or not is_enough or value > self.most:
            raise self._refusal(fault or f"is {value}")

    def _refusal(self, fault: str) -> InvalidRequest:
        return InvalidRequest(f"{self.option} {fault}; allowed: {self.allowed}", field=f"sampling.{self.option}")


def declare(meaning: str, *, default: Any, **declared: Any) -> Any:
    """Return a field of `SamplingParams`; `declared` are further fields of its `Parameter`."""
    return field(default=default, metadata={"meaning": meaning, **declared})

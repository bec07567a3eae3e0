"""An input's bytes as a stream of decisions. Behind its end it reads zeros, which everywhere choose the plain value."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Source:
    """Reads decisions from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_empty(self) -> bool:
        """Whether only zeros are left."""
        return self._position >= len(self._data)

    def byte(self) -> int:
        """Return the next byte."""
        if self.is_empty:
            return 0
        self._position += 1
        return self._data[self._position - 1]

    def below(self, limit: int) -> int:
        """Return a number from 0 to limit - 1, at most 2**16."""
        return self.byte() % limit if limit <= 256 else (self.byte() << 8 | self.byte()) % limit

    def integer(self, num_bytes: int) -> int:
        """Return an unsigned integer."""
        return int.from_bytes(self.take(num_bytes), "little")

    def choose(self, values: Sequence[T]) -> T:
        """Return one of the values."""
        return values[self.below(len(values))]

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes, with zeros behind the end."""
        taken = self._data[self._position : self._position + num_bytes]
        self._position += num_bytes
        return taken.ljust(num_bytes, b"\0")

    def rest(self) -> bytes:
        """Return everything that is left."""
        rest, self._position = self._data[self._position :], len(self._data)
        return rest

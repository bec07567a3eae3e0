"""A step's inputs on a device: packed columns of numbers, and rows of tables that stay there between steps."""

import math
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.devices import device_for

# Columns start at multiples of 16 bytes: Triton compiles a kernel again for pointers that are less aligned.
_ALIGNMENT_WORDS = 2

_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float64): torch.float64}


@dataclass(frozen=True, slots=True)
class Column:
    """Place of a column in the packed words."""

    first_word: int
    num_words: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, words: Tensor) -> Tensor:
        """Return the column as a view of packed words, int64 [num_words or more], contiguous."""
        items = words[self.first_word : self.first_word + self.num_words].view(self.dtype)
        return items[: math.prod(self.shape)].view(self.shape)


class PackedColumns:
    """Collects columns, then uploads them. Used once."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.generic]] = []
        self._columns: list[Column] = []
        self.num_words = 0

    def ints(self, values: Seq[int] | npt.NDArray[np.int64]) -> Column:
        """Add an int64 column [len(values)]."""
        return self.add(np.asarray(values, dtype=np.int64))

    def floats(self, values: Seq[float] | npt.NDArray[np.float64]) -> Column:
        """Add a float64 column [len(values)]."""
        return self.add(np.asarray(values, dtype=np.float64))

    def add(self, array: npt.NDArray[np.generic]) -> Column:
        """Add an array of int64, int32 or float64, of any shape; it is read at the upload."""
        array = np.ascontiguousarray(array)
        num_words = -(-array.nbytes // (8 * _ALIGNMENT_WORDS)) * _ALIGNMENT_WORDS
        column = Column(self.num_words, num_words, _DTYPES[array.dtype], array.shape)
        self._arrays.append(array)
        self._columns.append(column)
        self.num_words += num_words
        return column

    def upload(self, device: torch.device) -> Tensor:
        """Start the copy; return the packed words in new memory of the device, int64 [num_words]."""
        words = torch.empty(self.num_words, dtype=torch.int64, device=device)
        self._send(words)
        return words

    def upload_into(self, arena: Tensor, *, num_fixed: int) -> Tensor:
        """Start the copy into an arena, int64 [arena_words]; return the packed words.

        The first `num_fixed` words are always at the arena's beginning. When the rest does not fit, the returned words
        lie elsewhere.
        """
        if self.num_words <= len(arena):
            words = arena[: self.num_words]
            self._send(words)
            return words
        words = self.upload(arena.device)
        arena[:num_fixed].copy_(words[:num_fixed])
        return words

    def words(self) -> npt.NDArray[np.int64]:
        """Return the packed words, for another process."""
        words = np.zeros(self.num_words, dtype=np.int64)
        self._fill(words)
        return words

    def _send(self, target: Tensor) -> None:
        if not self.num_words:
            return
        device = device_for(target.device)
        staged = device.staging(self.num_words)
        self._fill(staged.numpy())
        device.send(staged, target)

    def _fill(self, words: npt.NDArray[np.int64]) -> None:
        for column, array in zip(self._columns, self._arrays, strict=True):
            place = words[column.first_word : column.first_word + column.num_words]
            place.view(array.dtype)[: array.size] = array.reshape(-1)


K = TypeVar("K", bound=Hashable)


class RowMap(Generic[K]):
    """Assigns rows of a table to keys; a new key gets a free row, else the least recently used one."""

    def __init__(self, num_rows: int) -> None:
        self._rows: OrderedDict[K, int] = OrderedDict()
        self._free = list(range(num_rows - 1, -1, -1))
        self.num_rows = num_rows

    def grow(self, num_rows: int) -> None:
        """Grow to at least `num_rows` rows; assigned rows stay."""
        self._free[:0] = range(num_rows - 1, self.num_rows - 1, -1)
        self.num_rows = max(self.num_rows, num_rows)

    def assign(self, keys: Seq[K]) -> list[int]:
        """Return the rows of one batch's keys, of which at most `num_rows` are distinct."""
        rows = self._rows
        assert len(keys) <= self.num_rows or len(set(keys)) <= self.num_rows, f"{len(keys)} keys, {self.num_rows} rows"
        unknown = False
        for key in keys:
            if key in rows:
                rows.move_to_end(key)
            else:
                unknown = True
        if unknown:
            for key in keys:
                if key not in rows:
                    rows[key] = self._free.pop() if self._free else rows.popitem(last=False)[1]
        return [rows[key] for key in keys]

"""Which row of a table belongs to whom, when the table outlives its users and nobody says goodbye."""

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RowMap(Generic[K]):
    """Gives keys rows, and a row that nobody asked for longest to the next key. Holds as many keys as rows."""

    def __init__(self, num_rows: int) -> None:
        self._rows: OrderedDict[K, int] = OrderedDict()
        self._free = list(range(num_rows - 1, -1, -1))
        self.num_rows = num_rows

    def grow(self, num_rows: int) -> None:
        """Have at least `num_rows` rows; those that are given stay where they are."""
        self._free[:0] = range(num_rows - 1, self.num_rows - 1, -1)
        self.num_rows = max(self.num_rows, num_rows)

    def assign(self, keys: Seq[K]) -> list[int]:
        """Return the rows of one batch's keys, equal ones for equal keys; at most `num_rows` are distinct."""
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

"""Blocks that booked plans will compute and that no event has confirmed yet. Each expectation lapses after a time."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    slot: int
    keys: list[int]
    expires_s: float


class Expectations:
    """Expected keys by slot. A key that is expected again lapses with its last batch."""

    def __init__(self) -> None:
        self._numbers: dict[int, dict[int, int]] = {}
        """Number of the last batch that expects a key, by slot and key."""
        self._batches: deque[_Batch] = deque()
        self._next_number = 0

    def __len__(self) -> int:
        return sum(map(len, self._numbers.values()))

    def of(self, slot: int) -> dict[int, int]:
        """Return the expected keys of a slot as the keys of a dict, which must not be changed."""
        return self._numbers.get(slot, {})

    def add(self, slot: int, keys: list[int], *, expires_s: float) -> None:
        """Expect keys; `expires_s` must not decrease from call to call."""
        if keys:
            self._numbers.setdefault(slot, {}).update(dict.fromkeys(keys, self._next_number))
            self._batches.append(_Batch(self._next_number, slot, keys, expires_s))
            self._next_number += 1

    def settle(self, slot: int, keys: Iterable[int]) -> None:
        """Drop expectations of keys, confirmed or given up."""
        expected = self._numbers.get(slot)
        if expected:
            deque(map(expected.pop, keys, repeat(None)), maxlen=0)

    def drop(self, slot: int) -> None:
        """Drop all expectations of a slot."""
        self._numbers.pop(slot, None)

    def lapse(self, now_s: float) -> Iterable[tuple[int, list[int]]]:
        """Drop expectations whose time has passed and yield them as (slot, keys)."""
        while self._batches and self._batches[0].expires_s <= now_s:
            batch = self._batches.popleft()
            expected = self._numbers.get(batch.slot, {})
            keys = [key for key in batch.keys if expected.get(key) == batch.number]
            if keys:
                self.settle(batch.slot, keys)
                yield batch.slot, keys

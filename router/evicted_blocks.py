"""Blocks that caches held and gave up: how much a larger cache would have found.

Keeps the keys that were evicted last, when no worker held them any more (the ghost list of ARC: Megiddo and Modha,
FAST 2003). A prompt that asks for one of them again would have found it, had the caches been larger.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

CAPACITY = 1 << 17


class EvictedBlocks:
    """Keys of evicted blocks, the latest `capacity` of them. Event loop only."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()
        """In the order of their evictions. A plain dict searches its oldest key behind all that were removed."""

    def add(self, keys: Iterable[int]) -> None:
        """Note blocks that the last worker has evicted."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def count_leading(self, keys: Sequence[int], *, start: int) -> int:
        """Return how many keys in a row, from `start` on, are of evicted blocks."""
        end = start
        while end < len(keys) and keys[end] in self._keys:
            end += 1
        return end - start

"""The order in which cached blocks were last used, and the blocks that were evicted last."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat


class BlockAges:
    """Numbered chunks of keys, oldest first. Event loop only.

    A key lies in the chunk of its last use, and the owner of the keys remembers that number (the key's *stamp*). An
    entry whose chunk is not the key's stamp is stale: the key was used again later, or is gone. Stale entries are swept
    out one chunk at a time, so nothing walks over all keys at once. An entry takes 8 bytes; a key has two at most.
    """

    def __init__(self, values: Mapping[int, int], *, stamp_mask: int, chunk_keys: int) -> None:
        """`values`, under the mask, are the stamps of the keys; they are read on every use."""
        self._values = values
        self._stamp_mask = stamp_mask
        self._chunk_keys = chunk_keys
        self._chunks: dict[int, array[int]] = {0: array("Q")}
        self.oldest = 0
        """Number of the first chunk that may hold anything."""
        self._next_swept = 0
        self.stamp = 0
        """Number of the chunk that is being filled."""
        self.num_entries = 0

    def use(self, keys: Sequence[int]) -> None:
        """Note that keys have been given the current stamp."""
        self._chunks[self.stamp].extend(keys)
        self.num_entries += len(keys)

    @property
    def is_full(self) -> bool:
        """Whether it is time for a new chunk."""
        return len(self._chunks[self.stamp]) >= self._chunk_keys

    def begin_chunk(self, *, num_keys: int) -> None:
        """Begin the next chunk, whose number stamps later uses. `num_keys` is the number of all keys."""
        self.stamp += 1
        self._chunks[self.stamp] = array("Q")
        # When more than half of the entries are stale, sweeping two chunks removes as many as one new chunk adds.
        for _ in range(2):
            if self.num_entries > 2 * num_keys + 2 * self._chunk_keys:
                self._sweep()

    def _sweep(self) -> None:
        """Remove the stale entries of the next old chunk."""
        while self.oldest not in self._chunks:
            self.oldest += 1
        number = max(self._next_swept, self.oldest)
        while number not in self._chunks:
            number += 1
        if number == self.stamp:
            number = self.oldest
        if number != self.stamp:
            self._replace(number, self.fresh(number))
        self._next_swept = number + 1

    def fresh(self, number: int) -> list[int]:
        """Return the keys whose last use lies in a chunk."""
        keys, mask = dict.fromkeys(self._chunks.get(number, ())), self._stamp_mask
        values = map(self._values.get, keys, repeat(-1))  # no chunk has the stamp of -1
        return [key for key, value in zip(keys, values, strict=True) if value & mask == number]

    def pop_oldest(self, num_keys: int) -> list[int]:
        """Remove and return at most `num_keys` least recently used keys; none only when there are none."""
        while True:
            keys = self.fresh(self.oldest)
            if keys:
                self._replace(self.oldest, keys[num_keys:])
                return keys[:num_keys]
            if self.oldest == self.stamp:
                return []
            self._replace(self.oldest, [])
            self.oldest += 1

    def _replace(self, number: int, keys: Sequence[int]) -> None:
        chunk = self._chunks.get(number, ())
        self.num_entries += len(keys) - len(chunk)
        if keys or number == self.stamp:
            self._chunks[number] = array("Q", keys)
        else:
            self._chunks.pop(number, None)


CAPACITY = 1 << 17


class EvictedBlocks:
    """The latest `capacity` keys of blocks that no worker holds any more. Event loop only.

    A prompt that asks for one of them would have found it in larger caches (the ghost list of ARC: Megiddo and Modha,
    FAST 2003).
    """

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()
        """Keys in the order of their evictions. A plain dict searches its oldest key behind all that were removed."""

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

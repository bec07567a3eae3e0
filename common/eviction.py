"""The eviction policy of workers: the order in which cached blocks go.

Cached blocks without a holder are in one of four segments: *brief* (another worker keeps them too), *tail* (the far end
of a long prompt), *cold* (used once) and *warm* (used again since they were cached). When room is needed, brief blocks
go first. After them goes the block that has outlived its segment by most: the oldest of each segment are compared by
their age over `MAX_AGE`, so that a warm block may become twice as old as a cold one, and eight times as old as a tail.

Why ages and not an order of segments: in production traces of chats, prompts that have been continued once are
continued again about twice as often as new ones, whatever their age; at twice the age both are worth the same (hit
density, as in Beckmann, Chen, Cidon: LHD, NSDI 2018, reduced to classes of similar age). A *protected* segment, which
is evicted only when all others are empty (2Q, segmented LRU, LRU-2), performs worse: it keeps chats that have ended.

Why tails: a prompt that is never sent again displaces less. When the reused blocks exceed the cache by far, the first
parts of many prompts stay instead of a few whole prompts, which would go before their reuse (the reason of bimodal
insertion: Qureshi et al., Adaptive Insertion Policies, ISCA 2007). A tail still lives until the next turn unless the
cache is very small.

`benchmarks/eviction.py` has the numbers. A block's position in its prompt does not change its value: deeper blocks cost
more attention to compute, but are useless without all blocks before them.
"""

import enum
import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class EvictionClass(enum.IntEnum):
    """Class of a cached block without a holder."""

    BRIEF = 0
    TAIL = 1
    COLD = 2
    WARM = 3


MAX_AGE = {EvictionClass.TAIL: 0.25, EvictionClass.COLD: 1.0, EvictionClass.WARM: 2.0}
"""Age at eviction, relative to cold blocks."""
MAX_VALUE = MAX_AGE[EvictionClass.WARM]
"""Value of a block that is in use and was used before."""
_ADMITTED_SHARE = 0.04
_MIN_ADMITTED = 16


def num_admitted(num_blocks: int) -> int:
    """Return how many new blocks of one prompt enter a cache of `num_blocks` before its tail begins."""
    return max(_MIN_ADMITTED, round(_ADMITTED_SHARE * num_blocks))


class EvictionOrder(Generic[T]):
    """Evictable blocks, under keys of any type. All operations are O(1).

    Leaf before parent: a child goes before its parent if it was put no later, into the same or a lower segment.
    """

    def __init__(self) -> None:
        self._segments: tuple[OrderedDict[T, int], ...] = tuple(OrderedDict() for _ in EvictionClass)
        self._now = 0
        """Age is counted in evicted blocks that were not brief."""
        self._ranked = [(segment, self._segments[segment], 1 / age) for segment, age in sorted(MAX_AGE.items())]

    @property
    def now(self) -> int:
        """Evictions so far, the clock of ages."""
        return self._now

    def pass_one(self) -> None:
        """Count an eviction from elsewhere in the same cache."""
        self._now += 1

    def __len__(self) -> int:
        return sum(map(len, self._segments))

    def __contains__(self, key: T) -> bool:
        return any(key in entries for entries in self._segments)

    def count(self, segment: EvictionClass) -> int:
        """Return the number of blocks in a segment."""
        return len(self._segments[segment])

    def put(self, key: T, segment: EvictionClass) -> None:
        """Add a block as the youngest of its segment."""
        self._segments[segment][key] = self._now

    def remove(self, key: T) -> None:
        """Take out a block that is in use again. Raises KeyError when it is missing."""
        for entries in self._segments[:0:-1]:
            if entries.pop(key, None) is not None:
                return
        del self._segments[EvictionClass.BRIEF][key]

    def evict(self) -> T:
        """Take out and return the first block in order. Raises KeyError when there is none."""
        segment, _value = self._next()
        self._now += segment is not EvictionClass.BRIEF
        return self._segments[segment].popitem(last=False)[0]

    def first(self) -> tuple[T, EvictionClass]:
        """Return the block that goes first, and its segment. There is one."""
        segment, _value = self._next()
        return next(iter(self._segments[segment])), segment

    def least_value(self) -> float:
        """Return the value of the block that goes first; 0 for a brief one, and when there is none.

        A block's *value* is its segment's `MAX_AGE` over its age, which counts from 1; the lowest value goes first.
        Values of two caches are comparable when both evict at the same rate.
        """
        return self._next()[1]

    def by_value(self) -> Iterator[tuple[float, T]]:
        """Yield values and blocks in the reverse order of eviction, without brief ones; O(1) each.

        Among equal values the higher segment comes first, and in a segment the latest: parents first. Any change of the
        order invalidates the iterator.
        """
        ranked = [
            ((value, segment, key) for key, value in self._values(segment)) for segment in sorted(MAX_AGE, reverse=True)
        ]
        for value, _segment, key in heapq.merge(*ranked, key=lambda entry: (entry[0], entry[1]), reverse=True):
            yield value, key

    def _values(self, segment: EvictionClass) -> Iterator[tuple[T, float]]:
        for key, put in reversed(self._segments[segment].items()):
            yield key, MAX_AGE[segment] / (self._now + 1 - put)

    def _next(self) -> tuple[EvictionClass, float]:
        """Return the segment whose oldest block goes first, and the value of that block; without any, the brief one."""
        first, most = EvictionClass.BRIEF, 0.0
        if self._segments[first]:
            return first, 0.0
        for segment, entries, rate in self._ranked:  # ties go to the lower segment: children before parents
            if entries and (outlived := (self._now + 1 - next(iter(entries.values()))) * rate) > most:
                first, most = segment, outlived
        return first, 1 / most if most else 0.0

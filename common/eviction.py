"""Which cached block goes first: the one policy that workers evict by.

Cached blocks that nobody holds are in one of four segments: *brief* (somebody else keeps them), *tail* (the far end of
what a long prompt brought), *cold* (used once) and *warm* (used again since they were cached). When room is needed,
brief blocks go first. Of the others goes the one that has outlived its segment by most: the oldest of each are
compared by their age over `MAX_AGE`, so that a warm block may become twice as old as a cold one, and eight times as
old as one of a tail.

Why ages and no order of segments: in production traces of chats, prompts that have been continued once are continued
again about twice as often as new ones, whatever their age; at twice the age both are worth the same (hit density, as
in Beckmann, Chen, Cidon: LHD, NSDI 2018, reduced to classes whose ages are alike). A *protected* segment, which is
evicted when nothing else is left (2Q, segmented LRU, LRU-2), loses instead: it keeps chats that have ended.

Why tails: a prompt that nobody sends twice displaces less. And where the blocks that are asked for again do not fit by
far, the first parts of many prompts stay instead of the whole of a few, which go before they are asked for (the reason
of bimodal insertion: Qureshi et al., Adaptive Insertion Policies, ISCA 2007). A tail stays long enough, though, to be
there for the next turn where the cache is not too small.

`benchmarks/eviction.py` has the numbers. A block is worth the same wherever it is in a prompt: computing a deeper one
costs more, by its attention, but nothing can be kept without all that is before it.
"""

import enum
import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Segment(enum.IntEnum):
    """Class of a cached block that nobody holds."""

    BRIEF = 0
    TAIL = 1
    COLD = 2
    WARM = 3


MAX_AGE = {Segment.TAIL: 0.25, Segment.COLD: 1.0, Segment.WARM: 2.0}
"""How old blocks become before they are evicted, relative to each other."""
MAX_VALUE = MAX_AGE[Segment.WARM]
"""Of a block that somebody uses, and that others used before."""
_ADMITTED_SHARE = 0.04
_MIN_ADMITTED = 16


def num_admitted(num_blocks: int) -> int:
    """Return how many new blocks of one prompt are no tail in a cache of `num_blocks`."""
    return max(_MIN_ADMITTED, round(_ADMITTED_SHARE * num_blocks))


class EvictionOrder(Generic[T]):
    """Blocks that may be evicted, by any key. All operations are O(1).

    Leaf before parent: a child goes before its parent if it was put no later, and into no higher segment.
    """

    def __init__(self) -> None:
        self._segments: tuple[OrderedDict[T, int], ...] = tuple(OrderedDict() for _ in Segment)
        self._now = 0
        """Age is counted in evicted blocks that were not brief."""
        self._ranked = [(self._segments[segment], 1 / max_age) for segment, max_age in sorted(MAX_AGE.items())]

    def __len__(self) -> int:
        return sum(map(len, self._segments))

    def count(self, segment: Segment) -> int:
        """Return the number of blocks in a segment."""
        return len(self._segments[segment])

    def put(self, key: T, segment: Segment) -> None:
        """Add a block as the youngest of its segment."""
        self._segments[segment][key] = self._now

    def remove(self, key: T) -> None:
        """Take a block out: somebody uses it. Raises KeyError when it is not here."""
        for entries in self._segments[:0:-1]:
            if entries.pop(key, None) is not None:
                return
        del self._segments[Segment.BRIEF][key]

    def evict(self) -> T:
        """Take out the block that goes first. Raises KeyError when there is none."""
        entries, _value = self._next()
        if entries is not self._segments[Segment.BRIEF]:
            self._now += 1
        return entries.popitem(last=False)[0]

    def least_value(self) -> float:
        """Return what the block is worth that goes first; 0 for a brief one, and when there is none.

        A block's *value* is its segment's `MAX_AGE` over its age, which counts from 1: blocks go in order of it. Values
        of two caches compare where both evict equally many blocks in the same time.
        """
        return self._next()[1]

    def by_value(self) -> Iterator[tuple[float, T]]:
        """Yield values and blocks, brief ones left out, in the reverse order of eviction; O(1) each.

        Of equal values the higher segment comes first, and in a segment the one that was put last: parents first. Not
        to be used on after a change.
        """
        ranked = [
            ((value, segment, key) for key, value in self._values(segment)) for segment in sorted(MAX_AGE, reverse=True)
        ]
        for value, _segment, key in heapq.merge(*ranked, key=lambda entry: (entry[0], entry[1]), reverse=True):
            yield value, key

    def _values(self, segment: Segment) -> Iterator[tuple[T, float]]:
        for key, put in reversed(self._segments[segment].items()):
            yield key, MAX_AGE[segment] / (self._now + 1 - put)

    def _next(self) -> "tuple[OrderedDict[T, int], float]":
        """Return the segment whose oldest block goes first, and what that is worth."""
        oldest = self._segments[Segment.BRIEF]
        if oldest:
            return oldest, 0.0
        most = 0.0
        for entries, rate in self._ranked:  # ties go to the lower segment: children before parents
            if entries and (outlived := (self._now + 1 - next(iter(entries.values()))) * rate) > most:
                oldest, most = entries, outlived
        return oldest, 1 / most if most else 0.0

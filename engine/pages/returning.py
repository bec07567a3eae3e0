"""The order in which cached pages go, when it is known of some chains how likely they are to be asked for again.

Without such knowledge it is the order of `common/eviction.py`. A router that knows how a turn of a session has ended
says how its chain compares with the average of its tenant (`ReturnCurve`): it is worth what an average turn is worth at
another age. The free pages of the chain then leave their segments and form a *strand*, whose *likeness*, that age,
changes as it ages. The strand with the greatest likeness goes first, from its last page on, before warm pages that are
younger than that, and before pages of other segments by their age relative to warm ones.

A page whose child is still cached does not go, though what is expected of its own chain is less: the prefix trees have
no holes. A strand whose last page has such a child is *parked* until the child has left; a page in a segment becomes
its youngest. A page without such a child is always there: the last blocks of what is free have none.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.eviction import MAX_AGE, MAX_VALUE, EvictionClass, EvictionOrder
from common.return_curve import ReturnCurve

_MIN_GARBAGE = 64
_LEAST_AGE_S = 1e-3


@dataclass(slots=True, eq=False)
class _Strand:
    pages: list[int]
    """Parents first. Pages that have left stay for a while: as many as are there, and some more."""
    curve: ReturnCurve
    ended_s: float
    put: int
    """Evictions before it was put."""
    num_pages: int
    """Pages that have not left."""
    step: int = 0
    """Index into the curve."""
    number: int = 0
    """Number of its valid entry in the heaps; entries with others are void."""
    is_parked: bool = False

    @property
    def like_s(self) -> float:
        return self.curve.like_s[self.step]


@dataclass(slots=True)
class _Heap:
    """Strands by a key, least first. Entries of strands that have moved stay until they come up or are too many."""

    entries: list[tuple[float, int, _Strand]] = field(default_factory=list)

    def push(self, key: float, strand: _Strand) -> None:
        heapq.heappush(self.entries, (key, strand.number, strand))

    def first(self) -> tuple[float, _Strand] | None:
        while self.entries:
            key, number, strand = self.entries[0]
            if number == strand.number:
                return key, strand
            heapq.heappop(self.entries)
        return None

    def sweep(self) -> None:
        self.entries = [entry for entry in self.entries if entry[1] == entry[2].number]
        heapq.heapify(self.entries)


class ReturningOrder:
    """Free cached pages of a pool. Every operation is O(pages named · log strands). Engine thread only."""

    def __init__(self, has_child: Callable[[int], bool], clock: Clock | None = None) -> None:
        """`has_child`: whether a cached page follows one. Without a clock nothing may be expected."""
        self._has_child = has_child
        self._clock = clock
        self._order: EvictionOrder[int] = EvictionOrder()
        self._put_s: dict[int, float] = {}
        """When the pages in segments were put."""
        self._strands: dict[int, _Strand] = {}
        """The strand of each page that is in one."""
        self._ranked = _Heap()
        """Strands that are not parked, by likeness, the greatest first."""
        self._due = _Heap()
        """The same by the time of their next likeness."""
        self._parked: dict[int, _Strand] = {}
        """By the last page."""
        self._num_entries = 0
        """Entries that were made since the last sweep."""
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._put_s) + len(self._strands)

    def __contains__(self, page: int) -> bool:
        return page in self._strands or page in self._put_s

    def count(self, segment: EvictionClass) -> int:
        """Return the pages in a segment; those in strands count as warm."""
        return self._order.count(segment) + (len(self._strands) if segment is EvictionClass.WARM else 0)

    def put(self, page: int, segment: EvictionClass) -> None:
        """Add a page as the youngest of its segment."""
        self._order.put(page, segment)
        self._put_s[page] = self._now_s()

    def remove(self, page: int) -> None:
        """Take out a page that is in use again, or dropped. Raises KeyError when it is missing."""
        strand = self._strands.get(page)
        if strand is None:
            del self._put_s[page]
            self._order.remove(page)
            return
        was_parked = strand.is_parked
        if was_parked:
            del self._parked[self._last(strand)]
        del self._strands[page]
        strand.num_pages -= 1
        if not strand.num_pages:
            strand.number, strand.is_parked = 0, False
        elif was_parked:
            self._enter(strand)
        if len(strand.pages) > _MIN_GARBAGE + 2 * strand.num_pages:
            strand.pages = list(self._pages_of(strand))

    def expect(self, pages: Sequence[int], curve: ReturnCurve) -> None:
        """Make a strand of cached pages, given parents first, of a turn that has just ended."""
        for page in pages:
            self.remove(page)
        if pages:
            strand = _Strand(list(pages), curve, self._now_s(), self._order.now, len(pages))
            self._strands |= dict.fromkeys(pages, strand)
            self._enter(strand)

    def left(self, parent: int) -> None:
        """Note that a child of a cached page has left."""
        if (strand := self._parked.pop(parent, None)) is not None:
            self._enter(strand)

    def evict(self) -> int:
        """Take out and return the first page in order. Raises KeyError when there is none."""
        if not (num_pages := len(self)):
            raise KeyError("no page is free")
        self._advance()
        page, segment = -1, EvictionClass.WARM
        for _ in range(num_pages):  # each page in a segment and each strand may turn out to have a child once
            strand = self._first_strand() if self._strands else None
            if strand is None or (self._put_s and self._first_like_s() >= strand.like_s):
                page, segment = self._order.first()
                if not self._has_child(page):
                    break
                self._order.remove(page)
                self.put(page, EvictionClass.WARM)  # it lives as long as its child, and something else goes
                if strand is None:
                    continue
            page, segment = self._last(strand), EvictionClass.WARM
            if not self._has_child(page):
                break
            strand.number, strand.is_parked = 0, True
            self._parked[page] = strand
        self.remove(page)
        if segment is not EvictionClass.BRIEF:
            self._order.pass_one()
        return page

    def least_value(self) -> float:
        """Return the value of the page that goes first (`EvictionOrder.least_value`)."""
        self._advance()
        strand = self._first_strand()
        if strand is None or (self._put_s and self._first_like_s() >= strand.like_s):
            return self._order.least_value()
        return self._value(strand)

    def by_value(self) -> Iterator[tuple[float, int]]:
        """Yield values and pages, the most valuable first, parents before children (`EvictionOrder.by_value`)."""
        strands = sorted(set(self._strands.values()), key=self._value, reverse=True)
        of_strands = ((self._value(strand), page) for strand in strands for page in self._pages_of(strand))
        yield from heapq.merge(self._order.by_value(), of_strands, key=lambda entry: entry[0], reverse=True)

    def _pages_of(self, strand: _Strand) -> Iterator[int]:
        """Yield the pages of a strand that have not left."""
        return (page for page in strand.pages if self._strands.get(page) is strand)

    def _last(self, strand: _Strand) -> int:
        """Return the last page of a strand that has one."""
        while self._strands.get(strand.pages[-1]) is not strand:
            strand.pages.pop()
        return strand.pages[-1]

    def _now_s(self) -> float:
        return 0.0 if self._clock is None else self._clock.monotonic()

    def _value(self, strand: _Strand) -> float:
        """Return the value of a strand's pages: that of warm ones of the age that they are like, at the same rate."""
        age_s = max(self._now_s() - strand.ended_s, _LEAST_AGE_S)
        age = (self._order.now + 1 - strand.put) * max(strand.like_s, _LEAST_AGE_S) / age_s
        return min(MAX_VALUE, MAX_AGE[EvictionClass.WARM] / age)

    def _first_like_s(self) -> float:
        """Return the age at which warm pages go as soon as the first page in a segment."""
        page, segment = self._order.first()
        if segment is EvictionClass.BRIEF:
            return math.inf
        return (self._now_s() - self._put_s[page]) * MAX_AGE[EvictionClass.WARM] / MAX_AGE[segment]

    def _enter(self, strand: _Strand) -> None:
        """Put a strand into the heaps with its present likeness; what was there of it is void."""
        strand.number, strand.is_parked = self._next_number, False
        self._next_number += 1
        self._ranked.push(-strand.like_s, strand)
        if strand.step < len(strand.curve.ages_s):
            self._due.push(strand.ended_s + strand.curve.ages_s[strand.step], strand)
        self._num_entries += 1
        if self._num_entries > _MIN_GARBAGE + 2 * len(self._strands):
            self._num_entries = 0
            self._ranked.sweep()
            self._due.sweep()

    def _advance(self) -> None:
        """Give each strand the likeness of its age."""
        if not self._strands:
            return
        now_s = self._now_s()
        while (first := self._due.first()) is not None and first[0] <= now_s:
            strand = first[1]
            while strand.step < len(strand.curve.ages_s) and strand.ended_s + strand.curve.ages_s[strand.step] <= now_s:
                strand.step += 1
            self._enter(strand)

    def _first_strand(self) -> _Strand | None:
        """Return the strand that goes first; of parked ones any, where nothing else is."""
        if (first := self._ranked.first()) is not None:
            return first[1]
        return None if self._put_s else next(iter(self._parked.values()), None)

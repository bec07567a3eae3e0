"""The order in which cached pages go, when it is known of some chains how likely they are to be asked for again.

Without such knowledge it is the order of `common/eviction.py`. A router that knows how a turn of a session has ended
says how its chain compares with the average of its tenant (`ReturnCurve`): it is worth what an average turn is worth at
another age. The free pages of the chain then leave their segments and form a *run*, whose *likeness*, that age, changes
as it ages. The run with the greatest likeness goes first, from its last page on, before warm pages that are younger
than that, and before pages of other segments by their age relative to warm ones.

A page whose child is still cached never goes, though what is expected of its own chain is less: the prefix trees have
no holes. A run whose last page has such a child is *parked* until the child has left.
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
class _Run:
    pages: dict[int, None]
    """Parents first."""
    curve: ReturnCurve
    ended_s: float
    put: int
    """Evictions before it was put."""
    step: int = 0
    """Index into the curve."""
    number: int = 0
    """Number of its valid entry in the heaps; entries with others are void."""
    is_parked: bool = False

    @property
    def like_s(self) -> float:
        return self.curve.like_s[self.step]

    @property
    def last(self) -> int:
        return next(reversed(self.pages))


@dataclass(slots=True)
class _Heap:
    """Runs by a key, least first. Entries of runs that have moved stay until they come up or are too many."""

    entries: list[tuple[float, int, _Run]] = field(default_factory=list)

    def push(self, key: float, run: _Run) -> None:
        heapq.heappush(self.entries, (key, run.number, run))

    def first(self) -> tuple[float, _Run] | None:
        while self.entries:
            key, number, run = self.entries[0]
            if number == run.number:
                return key, run
            heapq.heappop(self.entries)
        return None

    def sweep(self) -> None:
        self.entries = [entry for entry in self.entries if entry[1] == entry[2].number]
        heapq.heapify(self.entries)


class ReturningOrder:
    """Free cached pages of a pool. Every operation is O(pages named · log runs). Engine thread only."""

    def __init__(self, has_child: Callable[[int], bool], clock: Clock | None = None) -> None:
        """`has_child`: whether a cached page follows one. Without a clock nothing may be expected."""
        self._has_child = has_child
        self._clock = clock
        self._order: EvictionOrder[int] = EvictionOrder()
        self._put_s: dict[int, float] = {}
        """When the pages in segments were put."""
        self._runs: dict[int, _Run] = {}
        """The run of each page that is in one."""
        self._ranked = _Heap()
        """Runs that are not parked, by likeness, the greatest first."""
        self._due = _Heap()
        """The same by the time of their next likeness."""
        self._parked: dict[int, _Run] = {}
        """By the last page."""
        self._num_entries = 0
        """Entries that were made since the last sweep."""
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._order) + len(self._runs)

    def __contains__(self, page: int) -> bool:
        return page in self._runs or page in self._put_s

    def count(self, segment: EvictionClass) -> int:
        """Return the pages in a segment; those in runs count as warm."""
        return self._order.count(segment) + (len(self._runs) if segment is EvictionClass.WARM else 0)

    def put(self, page: int, segment: EvictionClass) -> None:
        """Add a page as the youngest of its segment."""
        self._order.put(page, segment)
        self._put_s[page] = self._now_s()

    def remove(self, page: int) -> None:
        """Take out a page that is in use again, or dropped. Raises KeyError when it is missing."""
        run = self._runs.pop(page, None)
        if run is None:
            del self._put_s[page]
            self._order.remove(page)
            return
        if run.is_parked:
            del self._parked[run.last]
        del run.pages[page]
        if not run.pages:
            run.number = 0
        elif run.is_parked:
            self._enter(run)

    def expect(self, pages: Sequence[int], curve: ReturnCurve) -> None:
        """Make a run of cached pages, given parents first, of a turn that has just ended."""
        for page in pages:
            self.remove(page)
        if pages:
            run = _Run(dict.fromkeys(pages), curve, self._now_s(), self._order.now)
            self._runs |= dict.fromkeys(pages, run)
            self._enter(run)

    def left(self, parent: int) -> None:
        """Note that a child of a cached page has left."""
        if (run := self._parked.pop(parent, None)) is not None:
            self._enter(run)

    def evict(self) -> int:
        """Take out and return the first page in order. Raises KeyError when there is none."""
        if not self._runs:
            page = self._order.evict()
            del self._put_s[page]
            return page
        self._advance()
        for _ in range(2 * len(self) + 1):
            run = self._first_run()
            if run is None or (len(self._order) and self._first_like_s() >= run.like_s):
                page = self._order.evict()
                if not self._has_child(page):
                    del self._put_s[page]
                    return page
                self.put(page, EvictionClass.WARM)  # a child is in a run: the page lives as long, something else goes
                if run is None:
                    continue
            page = run.last
            if not self._has_child(page):
                self.remove(page)
                self._order.pass_one()
                return page
            run.number, run.is_parked = 0, True
            self._parked[page] = run
        raise AssertionError(f"each of {len(self)} pages has a child that is cached")

    def least_value(self) -> float:
        """Return the value of the page that goes first (`EvictionOrder.least_value`)."""
        self._advance()
        run = self._first_run()
        if run is None or (len(self._order) and self._first_like_s() >= run.like_s):
            return self._order.least_value()
        return self._value(run)

    def by_value(self) -> Iterator[tuple[float, int]]:
        """Yield values and pages, the most valuable first, parents before children (`EvictionOrder.by_value`)."""
        runs = sorted(set(self._runs.values()), key=self._value, reverse=True)
        of_runs = ((self._value(run), page) for run in runs for page in run.pages)
        yield from heapq.merge(self._order.by_value(), of_runs, key=lambda entry: entry[0], reverse=True)

    def _now_s(self) -> float:
        return 0.0 if self._clock is None else self._clock.monotonic()

    def _value(self, run: _Run) -> float:
        """Return the value of a run's pages: that of warm ones of the age that they are like, at the same rate."""
        age_s = max(self._now_s() - run.ended_s, _LEAST_AGE_S)
        age = (self._order.now + 1 - run.put) * max(run.like_s, _LEAST_AGE_S) / age_s
        return min(MAX_VALUE, MAX_AGE[EvictionClass.WARM] / age)

    def _first_like_s(self) -> float:
        """Return the age at which warm pages go as soon as the first page in a segment."""
        page, segment = self._order.first()
        if segment is EvictionClass.BRIEF:
            return math.inf
        return (self._now_s() - self._put_s[page]) * MAX_AGE[EvictionClass.WARM] / MAX_AGE[segment]

    def _enter(self, run: _Run) -> None:
        """Put a run into the heaps with its present likeness; what was there of it is void."""
        run.number, run.is_parked = self._next_number, False
        self._next_number += 1
        self._ranked.push(-run.like_s, run)
        if run.step < len(run.curve.ages_s):
            self._due.push(run.ended_s + run.curve.ages_s[run.step], run)
        self._num_entries += 1
        if self._num_entries > _MIN_GARBAGE + 2 * len(self._runs):
            self._num_entries = 0
            self._ranked.sweep()
            self._due.sweep()

    def _advance(self) -> None:
        """Give each run the likeness of its age."""
        now_s = self._now_s()
        while (first := self._due.first()) is not None and first[0] <= now_s:
            run = first[1]
            while run.step < len(run.curve.ages_s) and run.ended_s + run.curve.ages_s[run.step] <= now_s:
                run.step += 1
            self._enter(run)

    def _first_run(self) -> _Run | None:
        first = self._ranked.first()
        return None if first is None else first[1]

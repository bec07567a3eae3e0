"""Result of a lookup in the prefix index: groups of workers that hold equally much of a prompt."""

from collections.abc import Container, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from itertools import repeat
from typing import cast

import numpy as np

from common.ids import WorkerId
from engine.window import BlockWindow
from router.fleet.expectations import Expectations
from router.fleet.prefix_groups import STAMP_BITS, slot_bit, usable_groups


def first_positions(values: Mapping[int, int], keys: Sequence[int]) -> dict[int, int]:
    """Return the different values of some keys, each with the first position that has it; 0 for an unknown key."""
    found = list(map(values.get, keys, repeat(0)))
    return dict(zip(reversed(found), range(len(found) - 1, -1, -1), strict=True))


def count_before_gap(firsts: Mapping[int, int], bit: int, num_keys: int) -> int:
    """Return how many leading keys have a bit, given their `first_positions`."""
    return min((position for value, position in firsts.items() if not value & bit), default=num_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexView:
    """The state of the index at a lookup, and the keys that were looked up."""

    keys: list[int]
    values: Mapping[int, int]
    slots: Mapping[WorkerId, int]
    expectations: Expectations
    num_usable: int
    """Most leading blocks that the request can use."""
    window_of: Mapping[int, BlockWindow]
    """Windows, by the slots of the workers that count only as far as they can begin."""
    tier_of: Mapping[int, int]
    """Slots of the blocks that are in tiers only, by the slots of the workers."""
    longest_held: int
    """Leading blocks that the best worker holds, of use or not."""

    def paged(self, i: int) -> int:
        """Return a mask of the slots whose owners have a window page of block i."""
        return self.values.get(self.keys[i], 0) >> (STAMP_BITS + 1)

    def count_usable(self, slot: int, num_held: int, *, unsure: Container[int] = ()) -> int:
        """Return behind how many of its blocks a worker can begin, without the window pages of the `unsure` keys."""
        if slot not in self.window_of:
            return num_held

        def paged(i: int) -> int:
            return 0 if self.keys[i] in unsure else self.paged(i)

        held = [(min(num_held, self.num_usable), 1 << slot)]
        usable = usable_groups(held, paged, self.window_of[slot])
        return usable[-1][0] if usable else 0

    def count_in_pages(self, slot: int, num_held: int) -> int:
        """Return how many of a worker's `num_held` leading blocks are in pages, or soon will be; the first ones are.

        Workers give the pages of leaves away before those of parents: it may be wrong only while messages are on their
        way.
        """
        tier = self.tier_of.get(slot)
        if tier is None:
            return num_held
        bit, coming, low, high = slot_bit(tier), self.expectations.of(tier), 0, num_held
        while low < high:
            middle = (low + high) >> 1
            key = self.keys[middle]
            if self.values.get(key, 0) & bit and key not in coming:
                high = middle
            else:
                low = middle + 1
        return low

    def count_in_pages_exactly(self, slot: int, num_held: int, firsts: Mapping[int, int]) -> int:
        """Return the same without this assumption; `firsts` are the `first_positions` of the keys."""
        tier = self.tier_of.get(slot)
        if tier is None:
            return num_held
        bit, coming = slot_bit(tier), self.expectations.of(tier)
        first = min((position for value, position in firsts.items() if value & bit), default=num_held)
        while first < num_held and (self.keys[first] in coming or not self.values.get(self.keys[first], 0) & bit):
            first += 1
        return min(first, num_held)


class PrefixMatches(Mapping[WorkerId, int]):
    """How many leading blocks each worker holds, and can use; a worker without any is absent.

    Hundreds of workers often form two or three groups, so a worker's number is looked up in `groups`; the mapping is
    built only for a policy that goes through all of it. Valid for one decision; event loop only.
    """

    __slots__ = ("_by_worker", "_firsts", "_in_pages", "_known", "_owners", "_view", "groups")

    def __init__(self, groups: Sequence[tuple[int, int]], owners: Sequence[WorkerId | None], view: IndexView) -> None:
        """`groups` are (blocks, bit mask of slots), fewest blocks first; `owners` go by slot and never change."""
        self.groups = groups
        self._owners = owners
        self._view = view
        self._by_worker: dict[WorkerId, int] | None = None
        self._known: dict[WorkerId, int] = {}
        """Numbers that were looked up or made exact; 0 for a worker that holds none."""
        self._firsts: dict[int, int] | None = None
        self._in_pages: dict[WorkerId, int] = {}
        """Numbers of blocks in pages that were looked up or made exact."""

    @property
    def longest(self) -> int:
        """Number of the best worker; 0 without any."""
        return self.groups[-1][0] if self.groups else 0

    @property
    def longest_held(self) -> int:
        """Leading blocks that some worker holds, of use or not."""
        return self._view.longest_held

    def verify(self, worker_id: WorkerId) -> bool:
        """Make the numbers of one worker exact and return whether they were. The groups do not change."""
        found = self.get(worker_id)
        exact = min(found, self._count_exactly(worker_id)) if found else 0
        if exact == found:
            return self._verify_in_pages(worker_id)
        self._known[worker_id] = exact
        self._in_pages.pop(worker_id, None)
        self._by_worker = None
        return False

    def num_in_pages(self, worker_id: WorkerId) -> int:
        """Return how many of the worker's blocks are in its pages: the leading ones; the others are in its tiers."""
        known = self._in_pages.get(worker_id)
        if known is None:
            found, slot = self.get(worker_id), self._view.slots.get(worker_id)
            known = found if slot is None else self._view.count_in_pages(slot, found)
            self._in_pages[worker_id] = known
        return known

    def _verify_in_pages(self, worker_id: WorkerId) -> bool:
        found, slot = self._in_pages.get(worker_id), self._view.slots.get(worker_id)
        if found is None or slot is None or slot not in self._view.tier_of:
            return True  # it was not asked for, or all is in pages
        exact = self._view.count_in_pages_exactly(slot, self.get(worker_id), self._first_positions())
        self._in_pages[worker_id] = exact
        return exact == found

    def longest_holders(self) -> Iterator[tuple[int, WorkerId]]:
        """Yield the (blocks, worker) from the most blocks on, as the groups have them."""
        for num_blocks, workers in reversed(self.groups):
            while workers:
                lowest = workers & -workers
                worker_id = self._owners[lowest.bit_length() - 1]
                assert worker_id is not None, "a slot in a group has an owner"
                yield num_blocks, worker_id
                workers ^= lowest

    def count_present(self, worker_id: WorkerId) -> int:
        """Return exactly how many leading blocks the worker can use by what events have confirmed; others are only
        expected.
        """
        num_blocks, slot = self.get(worker_id), self._view.slots.get(worker_id)
        if slot is None or not num_blocks:
            return 0
        num_held = self._count_confirmed(slot)
        return min(num_blocks, self._view.count_usable(slot, num_held, unsure=self._view.expectations.of(slot + 1)))

    def count_held(self, worker_id: WorkerId) -> int:
        """Return exactly how many leading blocks the worker holds, of use or not, as events have confirmed."""
        slot = self._view.slots.get(worker_id)
        return 0 if slot is None else self._count_confirmed(slot)

    def _count_confirmed(self, slot: int) -> int:
        num_held, expected = self._count_without_gap(slot), self._view.expectations.of(slot)
        if not expected:
            return num_held
        leading = self._view.keys[:num_held]
        return next((position for position, key in enumerate(leading) if key in expected), num_held)

    def _count_exactly(self, worker_id: WorkerId) -> int:
        slot = self._view.slots.get(worker_id)
        return 0 if slot is None else self._view.count_usable(slot, self._count_without_gap(slot))

    def _count_without_gap(self, slot: int) -> int:
        """Return how many leading blocks a worker holds. One walk serves all workers, because their values are few."""
        return count_before_gap(self._first_positions(), slot_bit(slot), self.longest_held)

    def _first_positions(self) -> dict[int, int]:
        if self._firsts is None:
            self._firsts = first_positions(self._view.values, self._view.keys[: self.longest_held])
        return self._firsts

    def __getitem__(self, worker_id: WorkerId) -> int:
        num_blocks = self.get(worker_id)
        if not num_blocks:
            raise KeyError(worker_id)
        return num_blocks

    def get(self, worker_id: WorkerId, default: int = 0) -> int:  # type: ignore[override]  # no other default is of use
        """Return the worker's number of blocks."""
        known = self._known.get(worker_id)
        if known is None:
            known = self._known[worker_id] = self._look_up(worker_id)
        return known or default

    def _look_up(self, worker_id: WorkerId) -> int:
        slot = self._view.slots.get(worker_id)
        if slot is None:
            return 0
        return next((num_blocks for num_blocks, workers in self.groups if workers >> slot & 1), 0)

    def items(self) -> ItemsView[WorkerId, int]:
        """Return the pairs; the inherited view would look each one up."""
        return self._expanded().items()

    def values(self) -> ValuesView[int]:
        """Return the numbers."""
        return self._expanded().values()

    def __contains__(self, worker_id: object) -> bool:
        return bool(self.get(cast(WorkerId, worker_id)))

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(self._expanded())

    def __len__(self) -> int:
        return len(self._expanded())

    def _expanded(self) -> dict[WorkerId, int]:
        if self._by_worker is None:
            self._by_worker = {}
            for num_blocks, workers in self.groups:
                self._by_worker.update(dict.fromkeys(self._members(workers), num_blocks))
            for worker_id, num_blocks in self._known.items():
                if num_blocks:
                    self._by_worker[worker_id] = num_blocks
                else:
                    self._by_worker.pop(worker_id, None)
        return self._by_worker

    def _members(self, workers: int) -> Iterator[WorkerId]:
        raw = np.frombuffer(workers.to_bytes(-(-len(self._owners) // 8), "little"), dtype=np.uint8)
        for slot in np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist():
            worker_id = self._owners[slot]
            assert worker_id is not None, f"slot {slot} has no owner"
            yield worker_id

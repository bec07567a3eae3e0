"""The prefix index: one dictionary from block key to a bit mask of the workers that hold the block.

A key is the first 60 bits of a block hash; a wrong match by collision costs a recomputation, never a wrong answer,
because workers compare whole hashes. Each worker owns a bit (its *slot*), above the low bits of a value, which say
when the block was last used:

    value = workers' bits << STAMP_BITS | number of the chunk (router.block_ages) that the key was last used in

- *Lookup*: a binary search over all workers at once, which splits where some hold a block and others do not. Workers
  evict leaves before parents, so a worker's part of a prompt has no holes except for messages still on their way: a
  number must be verified before it is used (`PrefixMatches.verify`).
- *Updates* work on batches: a batch has few different values, so each is computed once and shared by all its keys, and
  the rest is dictionary operations on whole lists.
- *Window pages* (`engine/pages/window_pages.py`) are the bits of a second slot, the one behind their worker's own. A
  worker has such a bit only in values in which it has its own, so that both go together.
- *Blocks that are in a worker's tiers only* have the bit of another slot, beside the worker's own: what a worker holds
  at all is matched first, and a binary search over this mark then finds how much of that is in pages.
- *Memory* is bounded: beyond `max_blocks`, the blocks that were neither stored nor routed to for the longest time go.
- *A snapshot* moves its worker to a fresh slot, so replacing or dropping everything that a worker holds is O(1). The
  old bit is scrubbed in slices, one with every later change, and only then used again.

Other routers may use the same workers: the index holds what workers publish and what this router expects of them.
"""

from collections import deque
from collections.abc import Iterator
from itertools import repeat

from common.block_hash import BlockHashes
from common.ids import WorkerId
from common.kv_events import KvEvents
from engine.window import BlockWindow
from router.fleet.block_ages import BlockAges, EvictedBlocks
from router.fleet.expectations import Expectations
from router.fleet.prefix_groups import STAMP_BITS, Group, held_groups, merged, slot_bit, usable_groups
from router.fleet.prefix_match import IndexView, PrefixMatches
from router.fleet.slots import Slots

CHUNK_KEYS = 4096
"""Keys that are aged, evicted or scrubbed at a time, in about a millisecond."""
BYTES_PER_BLOCK = 230
"""Upper bound for all structures together, with 512 workers; see benchmarks/router."""
_STAMP = (1 << STAMP_BITS) - 1
_NO_LIMIT = 1 << 62


class PrefixIndex:
    """Prefix index over all workers. Event loop only; a lookup costs microseconds."""

    def __init__(self, *, max_blocks: int = _NO_LIMIT, chunk_keys: int = CHUNK_KEYS) -> None:
        self._max_blocks = max_blocks
        self._chunk_keys = chunk_keys
        self._values: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        """Values given in this chunk; equal values are one object."""
        self._ages = BlockAges(self._values, stamp_mask=_STAMP, chunk_keys=chunk_keys)
        self._expectations = Expectations()
        self._slots = Slots()
        self._retired: set[int] = set()
        self._scrub_slots: set[int] = set()
        self._scrub_next = self._scrub_end = 0
        self.evicted = EvictedBlocks()
        """Blocks that workers have evicted and none holds any more."""
        self.num_evicted = 0
        """Blocks forgotten because memory is bounded."""

    @property
    def num_blocks(self) -> int:
        """Distinct known blocks, including entries that are not scrubbed yet."""
        return len(self._values)

    @property
    def num_expected(self) -> int:
        """Expected entries that no worker has confirmed."""
        return len(self._expectations)

    @property
    def has_tiers(self) -> bool:
        """Whether some worker has offloaded blocks."""
        return bool(self._slots.tier_of)

    # Changes.

    def apply(self, worker_id: WorkerId, events: KvEvents, *, window: BlockWindow | None = None) -> None:
        """Apply a batch of events of the worker. A snapshot replaces everything, expectations included.

        `window`: that whose pages it takes to go on behind blocks; None: the worker has no such pages.
        """
        if events.is_snapshot:
            self.drop(worker_id)
        slot = self._slots.of(worker_id, window)
        removed, stored = events.removed.keys, events.stored.keys
        if removed:
            self._settle(slot, removed)
            self._remove(slot, _unique(removed))
            self.evicted.add(key for key in removed if key not in self._values)
        if stored:
            self._settle(slot, stored)
            marks = self._slots.bits(slot) ^ slot_bit(slot)
            for keys in self._chunks(stored):
                self._put(slot, keys, list(map(self._values.get, keys, repeat(0))), clear=marks)
        if slot in self._slots.window_of:
            self._mark(slot, slot + 1, events.paged.keys)
            self._remove(slot + 1, _unique(events.unpaged.keys))
            self._expectations.settle(slot + 1, events.paged.keys + events.unpaged.keys)
        if offloaded := events.offloaded.keys:
            tier = self._slots.tier(slot)
            self._mark(slot, tier, offloaded)
            self._expectations.settle(tier, offloaded)
        self._scrub()

    def expect(self, worker_id: WorkerId, hashes: BlockHashes, *, expires_s: float) -> None:
        """Count blocks as held that a plan just sent to the worker, until an event confirms them or time passes.

        Of window pages only those at their end will be there, and of blocks that are held events tell. Blocks that are
        in the worker's tiers only count as if they were in pages again. `expires_s` must not decrease from call to
        call.
        """
        slot = self._slots.of(worker_id)
        unconfirmed: list[int] = []
        for keys in self._chunks(hashes.keys):
            olds = list(map(self._values.get, keys, repeat(0)))
            unconfirmed += self._unconfirmed(slot, keys, olds)
            self._put(slot, keys, olds)
        self._expectations.add(slot, unconfirmed, expires_s=expires_s)
        if (window := self._slots.window_of.get(slot)) is not None:
            awaited, keys = set(unconfirmed), hashes.keys
            keys = [key for key in keys[window.first_needed(len(keys)) :] if key in awaited]
            unconfirmed = self._unconfirmed(slot + 1, keys, list(map(self._values.get, keys, repeat(0))))
            self._mark(slot, slot + 1, keys)
            self._expectations.add(slot + 1, unconfirmed, expires_s=expires_s)
        if (tier := self._slots.tier_of.get(slot)) is not None:
            bit, get = slot_bit(tier), self._values.get
            self._expectations.add(tier, [key for key in hashes.keys if get(key, 0) & bit], expires_s=expires_s)

    def retract(self, worker_id: WorkerId, hashes: BlockHashes) -> None:
        """Forget those of the blocks that were expected of the worker and that no event has confirmed."""
        slot = self._slots.by_worker.get(worker_id)
        if slot is None:
            return
        for each in self._slots.each(slot):
            expected = self._expectations.of(each)
            keys = [key for key in _unique(hashes.keys) if key in expected]
            self._settle(each, keys)
            self._remove(each, keys)
        if (tier := self._slots.tier_of.get(slot)) is not None:
            self._expectations.settle(tier, hashes.keys)

    def expire(self, now_s: float) -> int:
        """Forget expectations whose time has passed and return how many they were."""
        num_expired, tiers = 0, self._slots.tier_of.values()
        for slot, lapsed in self._expectations.lapse(now_s):
            if slot in tiers:
                continue  # the blocks are still where they were
            keys = _unique(lapsed)
            self._remove(slot, keys)
            num_expired += len(keys)
        return num_expired

    def drop(self, worker_id: WorkerId) -> None:
        """Forget everything that the worker holds. Harmless for an unknown worker."""
        retired = self._slots.give_back(worker_id)
        self._retired.update(retired)
        for slot in retired:
            for each in self._slots.each(slot):
                self._expectations.drop(each)
        if retired:
            self._scrub()

    # Lookups.

    def match(self, hashes: BlockHashes, *, num_usable: int | None = None) -> PrefixMatches:
        """Return, for each worker that holds the first block, how many leading blocks it holds.

        With `num_usable`, the most blocks that the request can use, workers that have window pages count as far as they
        could begin behind these blocks.

        Reads a few dozen of the keys, and for windows those of the end. When a worker's blocks have holes, its number
        may be too high, never too low: confirm a choice with `PrefixMatches.verify`.
        """
        keys = hashes.keys
        groups = held_groups(keys, self._values, self._slots.holders)
        view = IndexView(
            keys=keys,
            values=self._values,
            slots=self._slots.by_worker,
            expectations=self._expectations,
            num_usable=len(keys) if num_usable is None else num_usable,
            window_of={} if num_usable is None else self._slots.window_of,
            tier_of=self._slots.tier_of,
            longest_held=groups[-1][0] if groups else 0,
        )
        if num_usable is not None and self._slots.with_window:
            groups = self._usable(groups, view)
        return PrefixMatches(groups, self._slots.owners, view)

    def _usable(self, groups: list[Group], view: IndexView) -> list[Group]:
        """Return what workers can use of the blocks that they hold."""
        usable: list[Group] = []
        for window, bits in self._slots.with_window.items():
            mask = bits >> STAMP_BITS
            held = merged((min(end, view.num_usable), workers & mask) for end, workers in groups if workers & mask)
            usable += usable_groups(held, view.paged, window)
            groups = [(end, workers & ~mask) for end, workers in groups if workers & ~mask]
        return merged([*groups, *usable])

    # Inside.

    def _chunks(self, keys: list[int]) -> Iterator[list[int]]:
        if len(keys) <= self._chunk_keys:
            yield keys
            return
        for begin in range(0, len(keys), self._chunk_keys):
            yield keys[begin : begin + self._chunk_keys]

    def _unconfirmed(self, slot: int, keys: list[int], olds: list[int]) -> list[int]:
        """Return the keys that no event has confirmed: those not held and those only expected."""
        bit, expected, kinds = slot_bit(slot), self._expectations.of(slot), set(olds)
        without = {old for old in kinds if not old & bit}
        if len(without) == len(kinds):
            return keys
        if not without and not expected:
            return []
        return [key for key, old in zip(keys, olds, strict=True) if old in without or key in expected]

    def _put(self, slot: int, keys: list[int], olds: list[int], *, clear: int = 0) -> None:
        """Add at most a chunk of keys, whose values were `olds`, to a worker and mark them as just used.

        `clear`: bits that go.
        """
        bit, stamp, share = slot_bit(slot), self._ages.stamp, self._shared.setdefault
        keep = self._slots.live & ~clear  # a key that is used again loses the bits of retired slots
        becomes: dict[int, int] = {}
        for old in set(olds):
            new = old & keep | bit | stamp
            becomes[old] = share(new, new)
        if len(becomes) == 1:
            news = dict.fromkeys(keys, becomes[olds[0]])
        else:
            news = dict(zip(keys, map(becomes.__getitem__, olds), strict=True))
        self._values.update(news)
        self._ages.use(keys)
        if self._ages.is_full:
            self._begin_chunk()
        if len(self._values) > self._max_blocks:
            self._evict(len(self._values) - self._max_blocks)

    def _remove(self, slot: int, keys: list[int]) -> None:
        """Remove distinct keys from a worker."""
        self._clear_bits(keys, keep=self._slots.live & ~self._slots.bits(slot))

    def _mark(self, slot: int, mark_slot: int, keys: list[int]) -> None:
        """Set the bit of another slot in those of the keys that a worker holds."""
        bit, mark, share = slot_bit(slot), slot_bit(mark_slot), self._shared.setdefault
        olds = list(map(self._values.get, keys, repeat(0)))
        becomes = {old: share(old | mark, old | mark) for old in set(olds) if old & bit}
        self._values.update((key, becomes[old]) for key, old in zip(keys, olds, strict=True) if old in becomes)

    def _settle(self, slot: int, keys: list[int]) -> None:
        for each in self._slots.each(slot):
            self._expectations.settle(each, keys)
        if (tier := self._slots.tier_of.get(slot)) is not None:
            self._expectations.settle(tier, keys)

    def _clear_bits(self, keys: list[int], *, keep: int) -> None:
        """Clear all worker bits but `keep` from the values of distinct keys; keys without any bit left go."""
        pop = self._values.pop
        olds = list(map(self._values.get, keys, repeat(0)))
        becomes = {old: old & (keep | _STAMP) if old & keep else 0 for old in set(olds)}
        if not any(becomes.values()):
            deque(map(pop, keys, repeat(None)), maxlen=0)
        elif any(old != new for old, new in becomes.items()):
            for key, old in zip(keys, olds, strict=True):
                new = becomes[old]
                if new:
                    self._values[key] = new
                else:
                    pop(key, None)

    def _evict(self, num_blocks: int) -> None:
        while num_blocks > 0:
            keys = self._ages.pop_oldest(num_blocks)
            assert keys, f"{len(self._values)} blocks, none of them has an age"
            deque(map(self._values.pop, keys), maxlen=0)
            num_blocks -= len(keys)
            self.num_evicted += len(keys)

    def _begin_chunk(self) -> None:
        self._ages.begin_chunk(num_keys=len(self._values))
        self._shared.clear()

    def _scrub(self) -> None:
        """Clear retired bits from one slice of the keys."""
        # Slots retired during a pass wait for the next one, because the pass may be past their keys. Keys that are used
        # during a pass lose retired bits at once, so keys that still have some lie in chunks from before the pass.
        if not self._scrub_slots:
            if not self._retired:
                return
            self._scrub_slots, self._retired = self._retired, set()
            self._begin_chunk()
            self._scrub_next, self._scrub_end = self._ages.oldest, self._ages.stamp
        num_seen = 0
        while self._scrub_next < self._scrub_end and num_seen < self._chunk_keys:
            keys = self._ages.fresh(self._scrub_next)
            self._clear_bits(keys, keep=self._slots.live)
            self._scrub_next += 1
            num_seen += len(keys) + 1
        if self._scrub_next >= self._scrub_end:
            for slot in self._scrub_slots:
                self._slots.free(slot)
            self._scrub_slots = set()


def _unique(keys: list[int]) -> list[int]:
    return keys if len(set(keys)) == len(keys) else list(dict.fromkeys(keys))

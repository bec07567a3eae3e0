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
from router.fleet.block_ages import BlockAges, EvictedBlocks
from router.fleet.expectations import Expectations
from router.fleet.prefix_match import STAMP_BITS, IndexView, PrefixMatches, slot_bit

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
        self._slots: dict[WorkerId, int] = {}
        self._owners: list[WorkerId | None] = []
        """Owner of each slot. Replaced, never changed, because matches keep a reference."""
        self._free_slots: list[int] = []
        self._live = 0
        """Bits of the slots that have owners, as in values."""
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

    # Changes.

    def apply(self, worker_id: WorkerId, events: KvEvents) -> None:
        """Apply a batch of events of the worker. A snapshot replaces everything, expectations included."""
        if events.is_snapshot:
            self.drop(worker_id)
        slot = self._slot(worker_id)
        removed, stored = events.removed.keys, events.stored.keys
        if removed:
            self._expectations.settle(slot, removed)
            self._remove(slot, _unique(removed))
            self.evicted.add(key for key in removed if key not in self._values)
        if stored:
            self._expectations.settle(slot, stored)
            for keys in self._chunks(stored):
                self._put(slot, keys, list(map(self._values.get, keys, repeat(0))))
        self._scrub()

    def expect(self, worker_id: WorkerId, hashes: BlockHashes, *, expires_s: float) -> None:
        """Count blocks as held that a plan just sent to the worker, until an event confirms them or time passes.

        `expires_s` must not decrease from call to call.
        """
        slot = self._slot(worker_id)
        unconfirmed: list[int] = []
        for keys in self._chunks(hashes.keys):
            olds = list(map(self._values.get, keys, repeat(0)))
            unconfirmed += self._unconfirmed(slot, keys, olds)
            self._put(slot, keys, olds)
        self._expectations.add(slot, unconfirmed, expires_s=expires_s)

    def retract(self, worker_id: WorkerId, hashes: BlockHashes) -> None:
        """Forget those of the blocks that were expected of the worker and that no event has confirmed."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        expected = self._expectations.of(slot)
        keys = [key for key in _unique(hashes.keys) if key in expected]
        self._expectations.settle(slot, keys)
        self._remove(slot, keys)

    def expire(self, now_s: float) -> int:
        """Forget expectations whose time has passed and return how many they were."""
        num_expired = 0
        for slot, lapsed in self._expectations.lapse(now_s):
            keys = _unique(lapsed)
            self._remove(slot, keys)
            num_expired += len(keys)
        return num_expired

    def drop(self, worker_id: WorkerId) -> None:
        """Forget everything that the worker holds. Harmless for an unknown worker."""
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        self._own(slot, None)
        self._live &= ~slot_bit(slot)
        self._retired.add(slot)
        self._expectations.drop(slot)
        self._scrub()

    # Lookups.

    def match(self, hashes: BlockHashes) -> PrefixMatches:
        """Return, for each worker that holds the first block, how many leading blocks it holds.

        Reads a few dozen of the keys. When a worker's blocks have holes, its number may be too high, never too low:
        confirm a choice with `PrefixMatches.verify`.
        """
        keys = hashes.keys
        groups: list[tuple[int, int]] = []
        get = self._values.get
        alive = get(keys[0], 0) & self._live if keys else 0
        if not alive:
            return PrefixMatches(groups, self._owners, self._view(keys))
        last = len(keys) - 1
        hold_all = alive & get(keys[last], 0)
        # Each worker of an entry holds block `low` but not block `high`. Workers with fewer blocks come first.
        ranges = [(alive ^ hold_all, 0, last)] if hold_all != alive else []
        while ranges:
            workers, low, high = ranges.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                holders = workers & get(keys[middle], 0)
                if holders == workers:
                    low = middle
                else:
                    if holders:
                        ranges.append((holders, middle, high))
                        workers ^= holders
                    high = middle
            groups.append((high, workers >> STAMP_BITS))
        if hold_all:
            groups.append((len(keys), hold_all >> STAMP_BITS))
        return PrefixMatches(groups, self._owners, self._view(keys))

    def _view(self, keys: list[int]) -> IndexView:
        return IndexView(keys=keys, values=self._values, slots=self._slots, expectations=self._expectations)

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

    def _put(self, slot: int, keys: list[int], olds: list[int]) -> None:
        """Add at most a chunk of keys, whose values were `olds`, to a worker and mark them as just used."""
        bit, stamp, share = slot_bit(slot), self._ages.stamp, self._shared.setdefault
        becomes: dict[int, int] = {}
        for old in set(olds):
            new = old & self._live | bit | stamp  # a key that is used again loses the bits of retired slots
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
        self._clear_bits(keys, keep=self._live & ~slot_bit(slot))

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

    # Slots.

    def _slot(self, worker_id: WorkerId) -> int:
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = self._free_slots.pop() if self._free_slots else len(self._owners)
            self._slots[worker_id] = slot
            self._own(slot, worker_id)
            self._live |= slot_bit(slot)
        return slot

    def _own(self, slot: int, worker_id: WorkerId | None) -> None:
        owners = [*self._owners, *[None] * (slot + 1 - len(self._owners))]
        owners[slot] = worker_id
        self._owners = owners

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
            self._clear_bits(keys, keep=self._live)
            self._scrub_next += 1
            num_seen += len(keys) + 1
        if self._scrub_next >= self._scrub_end:
            self._free_slots.extend(self._scrub_slots)
            self._scrub_slots = set()


def _unique(keys: list[int]) -> list[int]:
    return keys if len(set(keys)) == len(keys) else list(dict.fromkeys(keys))

"""Which worker holds which blocks: one dictionary from block key to a bit mask of workers.

A key is the first 64 bits of a block hash; a wrong match by collision costs a recomputation, never a wrong answer,
because workers compare whole hashes. Each worker owns a bit (its *slot*). A snapshot moves the worker to a fresh slot,
so replacing or dropping everything that a worker holds is O(1); the old bit is scrubbed from the dictionary
in slices, a slice with every later change, and only then used again.
"""

from collections import deque

from common.block_hash import BlockHashes
from common.ids import WorkerId
from common.kv_events import KvEvents

SCRUB_KEYS_PER_CHANGE = 4096


class PrefixIndex:
    """Prefix index over all workers. Event loop only; a lookup costs microseconds."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._slots: dict[WorkerId, int] = {}
        self._owners: dict[int, WorkerId] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._retired: set[int] = set()
        self._scrubbing: deque[int] = deque()
        self._scrub_slots: set[int] = set()
        self._live_mask = 0
        # (slot, key) -> time after which an unconfirmed entry goes; in order of that time.
        self._expected: dict[tuple[int, int], float] = {}

    @property
    def num_blocks(self) -> int:
        """Distinct blocks known, entries not scrubbed yet included."""
        return len(self._masks)

    @property
    def num_expected(self) -> int:
        """Entries that no worker has confirmed yet."""
        return len(self._expected)

    def apply(self, worker_id: WorkerId, events: KvEvents) -> None:
        """Follow a batch of the worker's own events. A snapshot replaces everything, expectations included."""
        if events.is_snapshot:
            self.drop(worker_id)
        slot = self._slot(worker_id)
        for key in events.removed.keys:
            self._clear(slot, key)
        bit = 1 << slot
        for key in events.stored.keys:
            self._masks[key] = self._masks.get(key, 0) | bit
            self._expected.pop((slot, key), None)
        self._scrub()

    def expect(self, worker_id: WorkerId, hashes: BlockHashes, *, expires_s: float) -> None:
        """Count blocks as held that a plan just sent to the worker, until an event confirms them or time passes.

        `expires_s` must not decrease from call to call.
        """
        slot = self._slot(worker_id)
        bit = 1 << slot
        for key in hashes.keys:
            mask = self._masks.get(key, 0)
            is_expected = self._expected.pop((slot, key), None) is not None
            if mask & bit and not is_expected:
                continue
            self._masks[key] = mask | bit
            self._expected[(slot, key)] = expires_s

    def retract(self, worker_id: WorkerId, hashes: BlockHashes) -> None:
        """Forget those of the blocks that were expected of the worker and that no event has confirmed."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        for key in hashes.keys:
            if (slot, key) in self._expected:
                self._clear(slot, key)

    def expire(self, now_s: float) -> int:
        """Forget expectations whose time has passed; returns how many."""
        num_expired = 0
        while self._expected:
            (slot, key), expires_s = next(iter(self._expected.items()))
            if expires_s > now_s:
                break
            self._clear(slot, key)
            num_expired += 1
        return num_expired

    def drop(self, worker_id: WorkerId) -> None:
        """Forget everything that the worker holds. Harmless for an unknown one."""
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        del self._owners[slot]
        self._live_mask &= ~(1 << slot)
        self._retired.add(slot)
        for entry in [entry for entry in self._expected if entry[0] == slot]:
            del self._expected[entry]
        self._scrub()

    def match(self, hashes: BlockHashes) -> dict[WorkerId, int]:
        """Return, for each worker that holds the first block, how many leading blocks it holds.

        Found by galloping search over all workers at once, which reads a few dozen of the keys. Where a worker's
        blocks have holes the number may be too high, never too low: confirm a choice with `count_leading`.
        """
        keys = hashes.keys
        if not keys:
            return {}
        alive = self._masks.get(keys[0], 0) & self._live_mask
        found: dict[WorkerId, int] = {}
        low, step, last = 0, 1, len(keys) - 1
        while alive and low < last:
            high = min(low + step, last)
            still = alive & self._masks.get(keys[high], 0)
            self._bisect(keys, alive & ~still, low, high, found)
            alive, low, step = still, high, step * 2
        self._record(alive, len(keys), found)
        return found

    def count_leading(self, worker_id: WorkerId, hashes: BlockHashes, *, at_most: int) -> int:
        """Return exactly how many leading blocks the worker holds, looking at `at_most` of them."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return 0
        bit = 1 << slot
        for position, key in enumerate(hashes.keys[:at_most]):
            if not self._masks.get(key, 0) & bit:
                return position
        return min(at_most, len(hashes))

    def count_present(self, worker_id: WorkerId, hashes: BlockHashes, *, at_most: int) -> int:
        """Like `count_leading`, but ends before the first block that no event has confirmed."""
        num_leading = self.count_leading(worker_id, hashes, at_most=at_most)
        if not self._expected or not num_leading:
            return num_leading
        slot = self._slots[worker_id]
        for position, key in enumerate(hashes.keys[:num_leading]):
            if (slot, key) in self._expected:
                return position
        return num_leading

    def _bisect(self, keys: list[int], workers: int, low: int, high: int, found: dict[WorkerId, int]) -> None:
        # Every worker of the mask holds block `low` and lacks block `high`.
        while workers:
            if high - low == 1:
                self._record(workers, high, found)
                return
            middle = (low + high) // 2
            holders = workers & self._masks.get(keys[middle], 0)
            self._bisect(keys, workers & ~holders, low, middle, found)
            workers, low = holders, middle

    def _record(self, workers: int, num_blocks: int, found: dict[WorkerId, int]) -> None:
        while workers:
            bit = workers & -workers
            found[self._owners[bit.bit_length() - 1]] = num_blocks
            workers ^= bit

    def _slot(self, worker_id: WorkerId) -> int:
        slot = self._slots.get(worker_id)
        if slot is None:
            if self._free_slots:
                slot = self._free_slots.pop()
            else:
                slot, self._num_slots = self._num_slots, self._num_slots + 1
            self._slots[worker_id] = slot
            self._owners[slot] = worker_id
            self._live_mask |= 1 << slot
        return slot

    def _clear(self, slot: int, key: int) -> None:
        self._expected.pop((slot, key), None)
        mask = self._masks.get(key, 0) & ~(1 << slot)
        if mask:
            self._masks[key] = mask
        else:
            self._masks.pop(key, None)

    def _scrub(self) -> None:
        # Slots retired during a pass wait for the next one: the pass may be past their keys.
        if not self._scrub_slots:
            if not self._retired:
                return
            self._scrub_slots, self._retired = self._retired, set()
            self._scrubbing = deque(self._masks)
        keep = ~sum(1 << slot for slot in self._scrub_slots)
        for _ in range(min(SCRUB_KEYS_PER_CHANGE, len(self._scrubbing))):
            key = self._scrubbing.popleft()
            mask = self._masks.get(key, 0) & keep
            if mask:
                self._masks[key] = mask
            else:
                self._masks.pop(key, None)
        if not self._scrubbing:
            self._free_slots.extend(self._scrub_slots)
            self._scrub_slots = set()

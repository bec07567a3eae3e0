"""Which page holds what: reference counts, the prefix cache, and eviction order. Bookkeeping only, no bytes.

A page is *held* (reference count > 0) or *free*. A free page may still be *cached*: its KV is reachable by block hash
until the page is handed out again. Free pages are handed out empty ones first, then those that were to be kept briefly,
then the others; cached ones in LRU order.

Leaf before parent: whoever holds a block holds its parents too, and `release` frees tails first, so in a list of free
pages a child always lies before its parent. For that to hold, a block is published only behind its published parent
(`Scheduler` keeps this): the cached blocks always form prefix trees without holes. Nor does a parent go briefly where
a child of it is kept: whoever kept the child held the parent too, and a page that had two holders is always kept.
"""

import enum
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from common.block_hash import BlockHashes
from common.ids import BlockHash, BlockId
from common.kv_events import KvEvents


class Retention(enum.Enum):
    """How long the pages of a sequence that is over stay cached."""

    KEEP = "keep"
    """Until they are the least recently used ones."""
    BRIEF = "brief"
    """They go before all that are kept, unless somebody used them again."""


class BlockPool:
    """Pages 0 … num_blocks-1 of one worker. Every operation is O(blocks named). Engine thread only."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, BlockId] = {}
        self._is_shared = bytearray(num_blocks)  # 1: had a second holder since it was handed out
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._brief: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._changes: dict[BlockHash, bool] = {}  # True: stored, False: removed; the last change of a hash wins

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, cached ones included."""
        return len(self._empty) + len(self._brief) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages held by somebody."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free pages that still hold reusable KV."""
        return len(self._brief) + len(self._kept)

    @property
    def num_cold(self) -> int:
        """Free pages that are handed out before any that is to be kept."""
        return len(self._empty) + len(self._brief)

    def ref_count(self, block_id: int) -> int:
        """Return the number of holders."""
        return self._ref_counts[block_id]

    def is_writable(self, block_id: int) -> bool:
        """Whether its one holder may write: nobody else holds it and no hash promises its content."""
        return self._ref_counts[block_id] == 1 and self._hash_of[block_id] is None

    def block_with(self, block_hash: BlockHash) -> BlockId | None:
        """Return the page that is published under `block_hash`."""
        return self._block_of.get(block_hash)

    def match_prefix(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the pages of the longest cached prefix. Takes no reference."""
        matched: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def num_matching(self, hashes: Sequence[BlockHash], num_at_most: int) -> int:
        """Return the length of the longest cached prefix of the first hashes. O(log blocks): there are no holes."""
        return bisect_left(hashes, 1, hi=num_at_most, key=lambda block_hash: block_hash not in self._block_of)

    def num_matched_free(self, block_ids: Iterable[BlockId]) -> int:
        """Return how many of these pages are free now: holding them would shrink `num_free` by that."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a holder to each page."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del (self._brief if block_id in self._brief else self._kept)[block_id]
            self._ref_counts[block_id] += 1
            self._is_shared[block_id] = 1

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Return fresh pages with one holder each, evicting cached ones as needed. The caller checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} free"
        taken: list[BlockId] = []
        for _ in range(num_blocks):
            if self._empty:
                block_id = self._empty.pop()
            else:
                block_id, _none = (self._brief or self._kept).popitem(last=False)
                self._unpublish(block_id)
            self._ref_counts[block_id] = 1
            self._is_shared[block_id] = 0
            taken.append(BlockId(block_id))
        return taken

    def release(self, block_ids: Sequence[int], retention: Retention = Retention.KEEP) -> None:
        """Remove a holder from each page of a block table (given in table order), tail first."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id}: ref_cnt {self._ref_counts[block_id]}"
            if self._ref_counts[block_id] == 0:
                if self._hash_of[block_id] is None:
                    self._empty.append(block_id)
                elif retention is Retention.BRIEF and not self._is_shared[block_id]:
                    self._brief[block_id] = None
                else:
                    self._kept[block_id] = None

    def publish(self, block_id: BlockId, block_hash: BlockHash) -> BlockId:
        """Make a full, held page reachable by its hash. Returns the page that is: another one, if that came first."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is published by nobody"
        owner = self._block_of.get(block_hash)
        if owner is not None:
            return owner
        assert self._hash_of[block_id] is None, f"block {block_id} already has a hash"
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        self._changes[block_hash] = True
        return block_id

    def drain_events(self) -> KvEvents:
        """Return what changed since the last call."""
        if not self._changes:
            return KvEvents()
        changes, self._changes = self._changes, {}
        return KvEvents(
            stored=BlockHashes.of(h for h, stored in changes.items() if stored),
            removed=BlockHashes.of(h for h, stored in changes.items() if not stored),
        )

    def snapshot(self) -> KvEvents:
        """Return all published blocks."""
        return KvEvents(stored=BlockHashes.of(self._block_of), is_snapshot=True)

    def _unpublish(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            self._hash_of[block_id] = None
            del self._block_of[block_hash]
            self._changes[block_hash] = False

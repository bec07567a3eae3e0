"""Which page holds what: reference counts, the prefix cache, and eviction. Bookkeeping only, no bytes.

A page is *held* (reference count > 0) or *free*. A free page may still be *cached*: its KV is reachable by block hash
until the page is handed out again. Free pages are handed out empty ones first, then cached ones in the order of
`common/eviction.py`. A page is *reused* when a request found it here, or computed the same block beside it. What was
pulled for a request was not found here, nor is what another worker pulls from here used here again.

Leaf before parent: the cached blocks always form prefix trees without holes. That holds because

1. whoever holds a block holds its parents, and `release` frees tails first: a child becomes free before its parent;
2. a block is published only behind its published parent (`Pages` keeps this);
3. who reuses a block reuses all before it (`mark_reused`): the parent of a warm block is warm;
4. a block that was not reused belonged to one request alone, which divides its table once (`Keeping`), front to end:
   the parent of such a block is in no lower segment. (Pulls of it or from it keep all that they hold.)
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.block_hash import BlockHashes
from common.eviction import EvictionOrder, Segment
from common.ids import BlockHash, BlockId
from common.kv_events import KvEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Segments of a table's pages that nobody has reused, when they become free."""

    num_front: int
    front: Segment = Segment.COLD
    end: Segment = Segment.TAIL
    """Not higher than `front`."""


KEEP_ALL = Keeping(num_front=1 << 62)
KEEP_BRIEFLY = Keeping(num_front=0, end=Segment.BRIEF)


class BlockPool:
    """Pages 0 … num_blocks-1 of one worker. Every operation is O(blocks named). Engine thread only."""

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError without a block."""
        if num_blocks < 1:
            raise ValueError(f"cannot make a pool of {num_blocks} KV blocks: raise num_blocks or kv_memory_gib")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, BlockId] = {}
        self._parents = array("i", [-1]) * num_blocks
        """Of published pages: the page of the block before, which is published as long as this one is; -1 for none."""
        self._is_reused = bytearray(num_blocks)
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: EvictionOrder[int] = EvictionOrder()
        self._changes: dict[BlockHash, bool] = {}  # True: stored, False: removed; the last change of a hash wins

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages held by somebody."""
        return self.num_blocks - self.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free pages that still hold reusable KV."""
        return len(self._cached)

    @property
    def num_cold(self) -> int:
        """Free pages that are empty or were used once."""
        return len(self._empty) + len(self._cached) - self._cached.count(Segment.WARM)

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
                self._cached.remove(block_id)
            self._ref_counts[block_id] += 1

    def mark_reused(self, block_table: Sequence[int], num_blocks: int) -> None:
        """A request found a table's first blocks here, which it holds. O(those that nobody had found before)."""
        for i in range(num_blocks - 1, -1, -1):
            block_id = block_table[i]
            if self._is_reused[block_id]:
                return  # and so are all before it
            self._is_reused[block_id] = 1

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Return fresh pages with one holder each, evicting cached ones as needed. The caller checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} free"
        taken: list[BlockId] = []
        for _ in range(num_blocks):
            block_id = self._empty.pop() if self._empty else self._evict()
            self._ref_counts[block_id] = 1
            self._is_reused[block_id] = 0
            taken.append(BlockId(block_id))
        return taken

    def release(self, block_ids: Sequence[int], keeping: Keeping = KEEP_ALL) -> None:
        """Remove a holder from each page of a block table (given in table order), tail first."""
        for i in range(len(block_ids) - 1, -1, -1):
            block_id = block_ids[i]
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id}: ref_cnt {self._ref_counts[block_id]}"
            if self._ref_counts[block_id] == 0:
                if self._hash_of[block_id] is None:
                    self._empty.append(block_id)
                elif self._is_reused[block_id]:
                    self._cached.put(block_id, Segment.WARM)
                else:
                    self._cached.put(block_id, keeping.front if i < keeping.num_front else keeping.end)

    def publish(self, block_id: BlockId, block_hash: BlockHash, *, behind: int | None) -> BlockId:
        """Make a full, held page reachable by its hash. Returns the page that is: another one, if that came first.

        `behind` is the published page of the block before it; None for the first block of a prompt.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is published by nobody"
        owner = self._block_of.get(block_hash)
        if owner is not None:
            return owner
        assert self._hash_of[block_id] is None, f"block {block_id} already has a hash"
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        self._parents[block_id] = -1 if behind is None else behind
        self._changes[block_hash] = True
        return block_id

    # What is worth most (engine/hot_prefixes.py).

    def has_page_below(self, value: float) -> bool:
        """Whether the next page that `allocate` hands out is empty or holds what is worth less than `value`."""
        return bool(self._empty) or (len(self._cached) > 0 and self._cached.least_value() < value)

    def hottest(self) -> Iterator[tuple[float, int]]:
        """Yield values and free cached pages, what is worth most first. Not to be used on after a change."""
        return self._cached.by_value()

    def num_reused(self, block_table: Sequence[int]) -> int:
        """Return how many pages of a table, from the first one on, are reused. O(log blocks)."""
        return bisect_left(block_table, 1, key=lambda block_id: not self._is_reused[block_id])

    def is_reused(self, block_id: int) -> bool:
        """Whether a request found a held or cached page here."""
        return bool(self._is_reused[block_id])

    def hash_of(self, block_id: int) -> BlockHash:
        """Return the hash of a published page."""
        block_hash = self._hash_of[block_id]
        assert block_hash is not None, f"block {block_id} is not published"
        return block_hash

    def parent_of(self, block_id: int) -> int | None:
        """Return the page of the block before a published one; None for the first of a prompt."""
        parent = self._parents[block_id]
        return None if parent < 0 else parent

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

    def _evict(self) -> int:
        block_id = self._cached.evict()
        block_hash = self._hash_of[block_id]
        assert block_hash is not None, f"block {block_id} is cached without a hash"
        self._hash_of[block_id] = None
        del self._block_of[block_hash]
        self._changes[block_hash] = False
        return block_id

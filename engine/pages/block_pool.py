"""Reference counts of pages, the prefix cache, and eviction. Bookkeeping only, no bytes.

A page is *held* (reference count > 0) or *free*. A free page may still be *cached*: its KV is reachable by block hash
until the page is allocated again. Allocation takes empty pages first, then cached ones in the order of
`returning.py`, and pages that a tenant has pinned last (`cache_pins.py`). A page is *reused* when a request found
it here, computed the same block in parallel, or waits for it in a router's line. Pulling a block, from here or to here,
does not count as reuse.

Leaf before parent: the cached blocks always form prefix trees without holes, because

1. the holder of a block holds its parents, and `release` frees tails first: a child becomes free before its parent;
2. a block is published only after its parent (`Pages` ensures this);
3. a request that reuses a block reuses all before it (`mark_reused`): the parent of a warm block is warm;
4. a block that was not reused belonged to one request, which divides its table once (`Keeping`), front to end: the
   parent of such a block is in no lower segment. (Pulls keep everything that they hold.)
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from common.block_hash import BlockHashes
from common.clock import Clock
from common.eviction import MAX_VALUE, EvictionClass
from common.ids import NO_ROOT, BlockHash, BlockId, HashRoot
from common.kv_events import KvEvents
from common.return_curve import ReturnCurve
from engine.cache_marks import CacheMarks
from engine.device.memory import NoRoomForPages
from engine.pages.cache_pins import CachePins
from engine.pages.returning import ReturningOrder
from engine.pages.window_pages import WindowPages
from engine.published import ForgottenPages


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Segments for the pages of a table that were never reused, when they become free."""

    num_front: int
    front: EvictionClass = EvictionClass.COLD
    end: EvictionClass = EvictionClass.TAIL
    """Not higher than `front`."""


KEEP_ALL = Keeping(num_front=1 << 62)
KEEP_BRIEFLY = Keeping(num_front=0, end=EvictionClass.BRIEF)


class BlockPool:
    """Pages 0 … num_blocks-1 of one worker. Every operation but `forget` is O(blocks named). Engine thread only."""

    def __init__(
        self,
        num_blocks: int,
        windows: WindowPages | None = None,
        pins: CachePins | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`windows`: pages of layers that see a window; None: no such layer has pages of its own. `pins`: None: nothing
        is pinned.

        Without a `clock` no return may be expected.

        Raises NoRoomForPages for an empty pool.
        """
        if num_blocks < 1:
            raise NoRoomForPages(f"cannot make a pool of {num_blocks} KV blocks: raise num_blocks or kv_memory_gib")
        self.num_blocks = num_blocks
        self.windows = windows
        self.pins = pins
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, BlockId] = {}
        self._parents = array("i", [-1]) * num_blocks
        """Page of the previous block, for each published page; -1 for the first block of a prompt."""
        self._num_children = array("i", [0]) * num_blocks
        """Published pages of next blocks, for each published page."""
        self._roots = [NO_ROOT] * num_blocks
        """Root of each published block's hash, empty where it is not known; where it is, it is for the parents, too."""
        self._is_reused = bytearray(num_blocks)
        self.lives = array("Q", [0]) * num_blocks
        """Published blocks that each page has lost; grows before the page gets other content. Any thread may read."""
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached = ReturningOrder(lambda block_id: self._num_children[block_id] > 0, clock)
        self._changes: dict[BlockHash, bool] = {}  # True: stored, False: removed; the last change of a hash wins

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, cached ones included."""
        return len(self._empty) + self.num_cached_blocks

    @property
    def num_used(self) -> int:
        """Pages that are held."""
        return self.num_blocks - self.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free pages that still hold reusable KV."""
        return len(self._cached) + (len(self.pins.free) if self.pins is not None else 0)

    @property
    def num_cold(self) -> int:
        """Free pages that are empty, or were never reused and are not pinned."""
        return len(self._empty) + len(self._cached) - self._cached.count(EvictionClass.WARM)

    def ref_count(self, block_id: int) -> int:
        """Return the number of holders."""
        return self._ref_counts[block_id]

    def is_writable(self, block_id: int, *, num_copies: int = 0) -> bool:
        """Whether its holder may write: it is the only one, and no hash promises the page's content.

        `num_copies`: references that only copies have which are made before anything is written.
        """
        return self._ref_counts[block_id] - num_copies == 1 and self._hash_of[block_id] is None

    def match_prefix(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the pages of the longest cached prefix behind which a sequence may begin. Takes no reference."""
        matched: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return (
            matched if self.windows is None else matched[: self.windows.num_usable(len(matched), matched.__getitem__)]
        )

    def num_matching(self, hashes: Sequence[BlockHash], num_at_most: int) -> int:
        """Return the length of the longest cached prefix of the first hashes. O(log blocks): there are no holes."""
        return bisect_left(hashes, 1, hi=num_at_most, key=lambda block_hash: block_hash not in self._block_of)

    def num_usable(self, hashes: Sequence[BlockHash], num_at_most: int) -> int:
        """Return the length of what `match_prefix` would return of the first hashes."""
        num_matching = self.num_matching(hashes, num_at_most)
        if self.windows is None:
            return num_matching
        return self.windows.num_usable(num_matching, lambda i: self._block_of[hashes[i]])

    def num_matched_free(self, block_ids: Iterable[BlockId]) -> int:
        """Return how many of these pages are free: holding them would shrink `num_free` by that."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a holder to each page."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._take_from_cache(block_id)
            self._ref_counts[block_id] += 1

    def _take_from_cache(self, block_id: int) -> None:
        if self.pins is None or self.pins.free.pop(block_id, block_id) is not None:
            self._cached.remove(block_id)

    def mark_reused(self, block_table: Sequence[int], num_blocks: int) -> None:
        """Mark the first blocks of a held table as found here by a request. O(blocks that were not marked)."""
        for i in range(num_blocks - 1, -1, -1):
            block_id = block_table[i]
            if self._is_reused[block_id]:
                return  # so are all before it
            self._is_reused[block_id] = 1

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Return fresh pages with one holder each, evicting cached ones as needed. The caller checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} free"
        self.end_pins()
        taken: list[BlockId] = []
        for _ in range(num_blocks):
            block_id = self._empty.pop() if self._empty else self._evict()
            self._ref_counts[block_id] = 1
            self._is_reused[block_id] = 0
            taken.append(BlockId(block_id))
        return taken

    def release(self, block_ids: Sequence[int], keeping: Keeping = KEEP_ALL) -> None:
        """Remove a holder from each page of a block table (given in table order), tail first."""
        self.end_pins()
        for i in range(len(block_ids) - 1, -1, -1):
            block_id = block_ids[i]
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id}: ref_cnt {self._ref_counts[block_id]}"
            if self._ref_counts[block_id] == 0:
                if self._hash_of[block_id] is None:
                    self._discard(block_id)
                elif self.pins is not None and self.pins.holds(block_id):
                    self.pins.free[block_id] = None
                elif self._is_reused[block_id]:
                    self._cached.put(block_id, EvictionClass.WARM)
                else:
                    self._cached.put(block_id, keeping.front if i < keeping.num_front else keeping.end)

    def pin(self, marks: CacheMarks, block_table: Sequence[int]) -> int:
        """Pin the leading blocks of a held table, which are published, up to its marks; returns how many are pinned."""
        if self.pins is None:
            return 0
        self.end_pins()
        return self.pins.pin(marks, block_table)

    def end_pins(self) -> None:
        """End the pins whose time is over, and put their free pages where the others are."""
        if self.pins is None:
            return
        for block_id in self.pins.expire():
            if self._ref_counts[block_id] == 0:
                self.pins.free.pop(block_id)
                is_reused = self._is_reused[block_id]
                self._cached.put(block_id, EvictionClass.WARM if is_reused else EvictionClass.COLD)

    def publish(
        self, block_id: BlockId, block_hash: BlockHash, *, behind: int | None, root: HashRoot = NO_ROOT
    ) -> BlockId:
        """Make a full, held page reachable by its hash. Returns the published page: another one, if that came first.

        `behind` is the published page of the previous block; None for the first block of a prompt. `root` is that of
        the hash, if it is known.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is published without a holder"
        owner = self._block_of.get(block_hash)
        if owner is not None:
            return owner
        assert self._hash_of[block_id] is None, f"block {block_id} already has a hash"
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        self._parents[block_id] = -1 if behind is None else behind
        if behind is not None:
            self._num_children[behind] += 1
        self._changes[block_hash] = True
        self._learn_root(block_id, root)
        return block_id

    def _learn_root(self, block_id: int, root: HashRoot) -> None:
        """Note the root of a block that is being published, which is also that of all before it."""
        parent = self._parents[block_id]
        self._roots[block_id] = root = root or (self._roots[parent] if parent >= 0 else NO_ROOT)
        while root and parent >= 0 and not self._roots[parent]:
            self._roots[parent] = root
            parent = self._parents[parent]

    def forget(self, root: HashRoot) -> ForgottenPages:
        """Drop the free cached blocks of a root, and those whose root is not known. O(num_blocks).

        No block that stays loses its parent: the parents have its root, and are held where it is.
        """
        published = [block_id for block_id, block_hash in enumerate(self._hash_of) if block_hash is not None]
        suspects = [block_id for block_id in published if self._roots[block_id] in (root, NO_ROOT)]
        free = [block_id for block_id in suspects if self._ref_counts[block_id] == 0]
        for block_id in free:
            self._take_from_cache(block_id)
            self._unpublish(block_id)
            self._discard(block_id)
        return ForgottenPages(num_blocks=len(free), is_in_use=len(free) < len(suspects))

    def expect_return(self, ends: Sequence[BlockHash], curve: ReturnCurve) -> None:
        """Keep a chain as long as a curve says. `ends`: the turn's last block, or one before it if that is not here.

        Pages that are held keep the usual order: another turn has begun with them.
        """
        block_id: int = next((self._block_of[each] for each in ends if each in self._block_of), -1)
        path: list[int] = []
        while block_id >= 0 and block_id in self._cached:
            path.append(block_id)
            block_id = self._parents[block_id]
        self._cached.expect(path[::-1], curve)

    # For engine/pages/hot_prefixes.py.

    def has_page_below(self, value: float) -> bool:
        """Whether the next page that `allocate` returns is empty or worth less than `value`."""
        return bool(self._empty) or (len(self._cached) > 0 and self._cached.least_value() < value)

    def hottest(self) -> Iterator[tuple[float, int]]:
        """Yield values and free cached pages, the most valuable first. Invalid after any change of the pool."""
        pinned = reversed(self.pins.free) if self.pins is not None else ()
        return chain(((MAX_VALUE, block_id) for block_id in pinned), self._cached.by_value())

    def last_reused(self, block_tables: Iterable[Sequence[int]]) -> Iterator[int]:
        """Yield the last page of each table that is reused, as all before it are. O(log blocks) each."""
        for table in block_tables:
            if num_reused := bisect_left(table, 1, key=lambda block_id: not self._is_reused[block_id]):
                yield table[num_reused - 1]

    def is_reused(self, block_id: int) -> bool:
        """Whether a request found a held or cached page here."""
        return bool(self._is_reused[block_id])

    def block_of(self, block_hash: BlockHash) -> BlockId:
        """Return the published page of a hash."""
        return self._block_of[block_hash]

    def hash_of(self, block_id: int) -> BlockHash:
        """Return the hash of a published page."""
        block_hash = self._hash_of[block_id]
        assert block_hash is not None, f"block {block_id} is not published"
        return block_hash

    def parent_of(self, block_id: int) -> int | None:
        """Return the page of the block before a published one; None for the first block of a prompt."""
        parent = self._parents[block_id]
        return None if parent < 0 else parent

    def drain_events(self) -> KvEvents:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, {}
        if self.windows is None:
            return KvEvents.of_changes(changes)
        # A block that was published since then may have got its page before; one that left the cache has no hash.
        has_page = {
            block_hash: self.windows.has_page(block_id)
            for block_id in self.windows.drain_changed()
            if (block_hash := self._hash_of[block_id]) is not None
        }
        stored = (block_hash for block_hash, is_stored in changes.items() if is_stored)
        has_page |= {each: True for each in stored if self.windows.has_page(self._block_of[each])}
        return KvEvents.of_changes(changes, has_page)

    def snapshot(self) -> KvEvents:
        """Return all published blocks."""
        windows, block_of = self.windows, self._block_of
        paged = () if windows is None else (each for each in block_of if windows.has_page(block_of[each]))
        return KvEvents(stored=BlockHashes.of(block_of), paged=BlockHashes.of(paged), is_snapshot=True)

    def _evict(self) -> int:
        block_id = self._cached.evict() if self._cached or self.pins is None else self.pins.evict()
        self._unpublish(block_id)
        if self.windows is not None:
            self.windows.drop(block_id)
        return block_id

    def _unpublish(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        assert block_hash is not None, f"block {block_id} is cached without a hash"
        if self.pins is not None:
            self.pins.drop(block_id)
        self.lives[block_id] += 1
        self._hash_of[block_id] = None
        del self._block_of[block_hash]
        self._changes[block_hash] = False
        if (parent := self._parents[block_id]) >= 0:
            self._num_children[parent] -= 1
            self._cached.left(parent)

    def _discard(self, block_id: int) -> None:
        self._empty.append(block_id)
        if self.windows is not None:
            self.windows.drop(block_id)

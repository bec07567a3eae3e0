"""Moves pages between the pool and the sequences' block tables, as the scheduler decides."""

from array import array
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Protocol

from common.eviction import num_admitted
from common.ids import BlockHash, BlockId, HashRoot
from engine.executor import Branch
from engine.pages.block_pool import KEEP_BRIEFLY, BlockPool, Keeping
from engine.published import PublishedBlock
from engine.request import Retention
from engine.sequence import Sequence
from engine.steps.window_tables import WindowTables


class PageHolder(Protocol):
    """A sequence, or a landing."""

    block_table: "array[int]"
    retired_blocks: list[BlockId]
    window_blocks: range


class Pages:
    """Every change of a block table is made here. Engine thread only."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.windows = WindowTables(pool.windows, block_size)
        self.num_admitted = num_admitted(pool.num_blocks)
        """Number of a sequence's new blocks that are not evicted as its tail (`common/eviction.py`)."""
        self.published: list[PublishedBlock] | None = None
        """Blocks that were published since the last report and are to be kept; None: nobody asks."""
        self._num_copies: Counter[int] = Counter()
        """References of each page that are those of copies in the step that is being planned. The copies come before
        the step's writes, so a sequence that is the only other holder may write the page."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the pages that `num_tokens` tokens need."""
        return -(-num_tokens // self._block_size)

    def take(self, sequence: Sequence, cached: Seq[BlockId], *, num_spared: int, ahead: Seq[Sequence] = ()) -> bool:
        """Give a sequence its cached prefix and fresh pages for all other known tokens. False when too few are free.

        `num_spared` pages must stay free, and window pages for those `ahead` in line. Sets num_cached_tokens,
        num_known_blocks, num_ready and num_computed.
        """
        num_fresh = self.num_blocks_for(sequence.num_tokens) - len(cached)
        if num_fresh + num_spared > self._pool.num_free - self._pool.num_matched_free(cached):
            return False
        if not self.windows.promise(sequence, ahead):
            return False
        self._pool.acquire(cached)
        self._pool.mark_reused(cached, sequence.num_found(len(cached)))
        if self._pool.pins is not None and sequence.request.cache_marks is not None:
            self._pool.pins.touch(sequence.request.cache_marks, cached)
        sequence.block_table = array("i", cached)
        num_known = self._pool.num_matching(sequence.block_hashes, sequence.num_reusable_blocks)
        last_known = self._pool.block_of(sequence.block_hashes[num_known - 1]) if num_known else None
        self.windows.begin(sequence, len(cached), last_known)
        sequence.block_table.extend(self._pool.allocate(num_fresh))
        self.release_landed(sequence)  # they are among the cached ones
        sequence.num_cached_tokens = sequence.num_ready = sequence.num_computed = len(cached) * self._block_size
        sequence.num_published = len(cached)
        sequence.num_known_blocks = num_known
        return True

    def num_missing(self, sequence: Sequence, num_new: int) -> int:
        """Return how many free pages it takes to write [num_computed, num_computed + num_new)."""
        table, first = sequence.block_table, sequence.num_computed // self._block_size
        num_fresh = max(0, self.num_blocks_for(sequence.num_computed + num_new) - len(table))
        shares_tail = first < len(table) and not self._is_writable(table[first])
        return num_fresh + shares_tail

    def num_missing_together(self, sequences: Seq[Sequence]) -> int:
        """Return how many free pages it takes to write one token of each of these, which may share pages.

        The last of several that share a page writes it in place.
        """
        num_missing = 0
        writers: Counter[int] = Counter()
        for sequence in sequences:
            table, first = sequence.block_table, sequence.num_computed // self._block_size
            if first == len(table):
                num_missing += 1
            else:
                writers[table[first]] += 1
        for block_id, num_writers in writers.items():
            num_holders = self._pool.ref_count(block_id) - self._num_copies[block_id]
            num_missing += num_writers - (num_holders == num_writers)
        return num_missing

    def make_writable(self, sequence: Sequence, num_new: int) -> tuple[BlockId, BlockId] | None:
        """Take the missing pages. Returns (source, target) when a shared page must be copied before the step."""
        table, first = sequence.block_table, sequence.num_computed // self._block_size
        copy: tuple[BlockId, BlockId] | None = None
        if first < len(table) and not self._is_writable(table[first]):
            assert first >= sequence.num_published, f"block {table[first]} is published and cannot be written"
            (target,) = self._pool.allocate(1)
            copy = BlockId(table[first]), target
            self._num_copies[table[first]] += 1  # of this table's reference
            self.windows.begin_copy(target)
            table[first] = target
        num_fresh = self.num_blocks_for(sequence.num_computed + num_new) - len(table)
        if num_fresh > 0:
            table.extend(self._pool.allocate(num_fresh))
        return copy

    def attach_windows(self, sequence: Sequence, num_new: int) -> None:
        """Take the window pages that it takes to write [num_computed, num_computed + num_new)."""
        self.windows.attach(sequence, sequence.num_computed + num_new)

    def _is_writable(self, block_id: int) -> bool:
        return self._pool.is_writable(block_id, num_copies=self._num_copies[block_id])

    def trim(self, sequence: Sequence) -> None:
        """Return the pages behind the computed tokens: those of rejected drafts. No step in flight may write them."""
        num_kept = self.num_blocks_for(sequence.num_computed)
        self.windows.trim(sequence, num_kept)
        self._pool.release(sequence.block_table[num_kept:])
        del sequence.block_table[num_kept:]

    def num_branch_blocks(self, sequence: Sequence, branch: Branch) -> int:
        """Return how many pages of its own a branch of a sequence takes that is about to run its last known token."""
        num_tokens = sequence.num_computed + 1 + branch.depth + len(branch.token_ids)
        return self.num_blocks_for(num_tokens) - sequence.num_computed // self._block_size

    def branch_off(self, sequence: Sequence, branch: Branch) -> tuple[BlockId, BlockId] | None:
        """Give a branch its pages. Returns (source, target) when the last block must be copied before the step."""
        num_shared, num_in_tail = divmod(sequence.num_computed, self._block_size)
        own = self._pool.allocate(self.num_branch_blocks(sequence, branch))
        branch.num_shared_blocks = num_shared
        branch.block_table = sequence.block_table[:num_shared] + array("i", own)
        if not num_in_tail:
            return None
        source = BlockId(sequence.block_table[num_shared])
        self._pool.acquire([source])
        self._num_copies[source] += 1
        return source, own[0]

    def adopt(self, sequence: Sequence, branch: Branch) -> None:
        """Exchange the last pages of a sequence and those of its branch, which hold the accepted tokens."""
        rest = slice(branch.num_shared_blocks, None)
        sequence.block_table[rest], branch.block_table[rest] = branch.block_table[rest], sequence.block_table[rest]

    def release_branches(self, branches: Seq[Branch]) -> None:
        """Return the pages that branches have. No step in flight may write them."""
        for branch in branches:
            self._pool.release(branch.block_table[branch.num_shared_blocks :])
            branch.block_table = array("i")

    def end_plan(self) -> None:
        """Note that the plan is launched or dropped. Until a launched step ends, its copies count as holders."""
        self._num_copies.clear()

    def release_sources(self, copies: Seq[tuple[BlockId, BlockId]]) -> None:
        """Release the sources of copies that were made, or never will be."""
        sources = [source for source, _target in copies]
        self.windows.end_copies(sources)
        self._pool.release(sources)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Add a reference to every page of a sequence that was just forked."""
        self._pool.acquire(child.block_table)
        self.windows.share(parent, child)

    def release(self, sequence: Sequence) -> None:
        """Return all pages of a sequence to the pool."""
        keeping = KEEP_BRIEFLY
        if sequence.request.retention is Retention.KEEP:
            keeping = Keeping(num_front=sequence.num_cached_tokens // self._block_size + self.num_admitted)
        self.windows.release(sequence)
        self._pool.release(sequence.block_table, keeping)
        self._pool.release(sequence.retired_blocks)
        sequence.block_table, sequence.retired_blocks = array("i"), []
        self.release_landed(sequence)
        sequence.num_computed = sequence.num_ready = sequence.num_cached_tokens = sequence.num_published = 0

    def release_landed(self, sequence: Sequence) -> None:
        """Release the pulled blocks of a waiting sequence; they stay cached."""
        self.windows.release_end(sequence.landed_blocks, sequence.landed_windows)
        sequence.landed_windows = range(0)
        self._pool.release(sequence.landed_blocks)
        sequence.landed_blocks = array("i")

    def publish(self, sequence: Sequence) -> None:
        """Put full blocks whose KV exists into the prefix cache, parents first.

        When a sibling was faster, its page replaces ours in the block table, so that later blocks can be published
        too. Our page stays held to the end: a puller, or a step in flight, may be reading it.
        """
        # num_ready, not num_computed: a published page must not depend on a step that could still fail. A step in
        # flight may also have filled a block with an unknown token, for which no hash exists.
        num_full = min(sequence.num_ready // self._block_size, len(sequence.block_hashes))
        is_kept = sequence.request.retention is Retention.KEEP
        root = sequence.request.hash_root
        while sequence.num_published < num_full:
            i = sequence.num_published
            self.publish_block(sequence, i, sequence.block_hashes[i], root, is_kept=is_kept)
            sequence.num_published += 1
        marks = sequence.request.cache_marks
        if marks is not None and sequence.num_pinned_blocks is None and marks.num_blocks <= sequence.num_published:
            sequence.num_pinned_blocks = self._pool.pin(marks, sequence.block_table)

    def publish_block(
        self, owner: PageHolder, i: int, block_hash: BlockHash, root: HashRoot, *, is_kept: bool = True
    ) -> None:
        """Publish block i of a table after its parent; an equal page that was published first replaces ours.

        `root`: that of the hash; empty when it is not known. `is_kept`: False when another worker keeps the block.
        """
        block_table = owner.block_table
        own = BlockId(block_table[i])
        published = self._pool.publish(own, block_hash, behind=block_table[i - 1] if i else None, root=root)
        if self.published is not None and published == own and root and is_kept:
            life = self._pool.lives[own]
            self.published.append(PublishedBlock(block_id=own, life=life, block_hash=block_hash, root=root))
        if published != own:
            self._pool.acquire([published])
            block_table[i] = published
            self._pool.mark_reused(block_table, i + 1)
            owner.retired_blocks.append(own)
            if i in owner.window_blocks:
                self.windows.hand_over(own, published)

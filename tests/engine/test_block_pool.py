"""BlockPool as a state machine: sequences over a two-token vocabulary, eight blocks of two tokens."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.block_hash import hash_blocks, hash_root
from common.eviction import EvictionClass
from common.ids import NO_ROOT, BlockHash, BlockId, HashRoot
from common.return_curve import ReturnCurve
from engine.pages.block_pool import KEEP_ALL, KEEP_BRIEFLY, BlockPool, Keeping
from engine.published import ForgottenPages
from tests.clock import ManualClock

ROOT, OTHER = (hash_root(model_fingerprint="test", cache_salt=tenant) for tenant in ("", "other"))
BLOCK_SIZE = 2
NUM_BLOCKS = 8


@dataclass
class Holder:
    tokens: list[int]
    table: list[BlockId]
    keeping: Keeping
    num_published: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    root: HashRoot = ROOT
    knows_root: bool = True


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pool = BlockPool(NUM_BLOCKS, clock=self.clock)
        self.holders: list[Holder] = []
        self.tokens_of: dict[BlockHash, tuple[int, ...]] = {}
        self.root_of: dict[BlockHash, HashRoot] = {}
        self.cached_at_router: set[BlockHash] = set()

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        num_front=st.integers(0, 4),
        keeping=st.sampled_from([KEEP_ALL, KEEP_BRIEFLY, None]),
        is_published=st.booleans(),
        root=st.sampled_from([ROOT, OTHER]),
        knows_root=st.booleans(),
    )
    def admit(
        self,
        tokens: list[int],
        num_front: int,
        keeping: Keeping | None,
        is_published: bool,
        root: HashRoot = ROOT,
        knows_root: bool = True,
    ) -> None:
        hashes = list(hash_blocks(tokens, root=root, block_size=BLOCK_SIZE))
        cached = self.pool.match_prefix(hashes)
        num_fresh = -(-len(tokens) // BLOCK_SIZE) - len(cached)
        if num_fresh > self.pool.num_free - self.pool.num_matched_free(cached):
            return
        for i, block_hash in enumerate(hashes):
            self.tokens_of[block_hash] = tuple(tokens[: (i + 1) * BLOCK_SIZE])
            self.root_of[block_hash] = root
        self.pool.acquire(cached)
        self.pool.mark_reused(cached, len(cached))
        keeping = keeping or Keeping(num_front=len(cached) + num_front)
        table = [*cached, *self.pool.allocate(num_fresh)]
        self.holders.append(Holder(tokens, table, keeping, len(cached), hashes, root, knows_root))
        while is_published and self.holders[-1].num_published < len(hashes):
            self.publish(self.holders[-1])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish_next(self, data: st.DataObject) -> None:
        self.publish(data.draw(st.sampled_from(self.holders)))

    def publish(self, holder: Holder) -> None:
        i = holder.num_published
        if i < len(holder.hashes):
            behind, root = holder.table[i - 1] if i else None, holder.root if holder.knows_root else NO_ROOT
            published = self.pool.publish(holder.table[i], holder.hashes[i], behind=behind, root=root)
            if published != holder.table[i]:
                self.pool.acquire([published])
                self.pool.release([holder.table[i]])
                holder.table[i] = published
                self.pool.mark_reused(holder.table, i + 1)
            holder.num_published += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.acquire(holder.table)
        copy = replace(holder, tokens=list(holder.tokens), table=list(holder.table), hashes=list(holder.hashes))
        self.holders.append(copy)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def pull_its_beginning(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        num_blocks = data.draw(st.integers(0, holder.num_published))
        self.pool.acquire(holder.table[:num_blocks])
        tokens, hashes = holder.tokens[: num_blocks * BLOCK_SIZE], holder.hashes[:num_blocks]
        self.holders.append(Holder(tokens, holder.table[:num_blocks], KEEP_ALL, num_blocks, hashes, holder.root))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        root=st.sampled_from([ROOT, OTHER]),
        like_s=st.lists(st.sampled_from([0.0, 1.0, 10.0, 100.0]), min_size=1, max_size=3),
        age_s=st.sampled_from([0.0, 1.0, 5.0]),
    )
    def expect(self, tokens: list[int], root: HashRoot, like_s: list[float], age_s: float) -> None:
        hashes = list(hash_blocks(tokens, root=root, block_size=BLOCK_SIZE))
        num_free = self.pool.num_free
        ages_s = tuple(age_s * i for i in range(1, len(like_s)))
        self.pool.expect_return(hashes[::-1], ReturnCurve(like_s=tuple(like_s), ages_s=ages_s))
        assert self.pool.num_free == num_free

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(root=st.sampled_from([ROOT, OTHER]))
    def forget(self, root: HashRoot) -> None:
        forgotten = self.pool.forget(root)
        left = [each for each in self.pool.snapshot().stored if self.root_of[each] == root]
        assert all(self.pool.ref_count(self.pool.block_of(each)) for each in left)
        assert forgotten.is_in_use or not left

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.table, holder.keeping)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if len(holder.tokens) % BLOCK_SIZE == 0:
            if not self.pool.num_free:
                return
            holder.table += self.pool.allocate(1)
        elif not self.pool.is_writable(holder.table[-1]):
            return
        holder.tokens.append(data.draw(st.integers(0, 1)))
        holder.hashes = list(hash_blocks(holder.tokens, root=holder.root, block_size=BLOCK_SIZE))
        for i, block_hash in enumerate(holder.hashes):
            self.tokens_of[block_hash] = tuple(holder.tokens[: (i + 1) * BLOCK_SIZE])
            self.root_of[block_hash] = holder.root

    @invariant()
    def free_plus_used_is_total(self) -> None:
        held = {block for holder in self.holders for block in holder.table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_free + self.pool.num_used == NUM_BLOCKS

    @invariant()
    def ref_count_is_number_of_holders(self) -> None:
        for block in range(NUM_BLOCKS):
            holders = sum(holder.table.count(BlockId(block)) for holder in self.holders)
            assert self.pool.ref_count(BlockId(block)) == holders

    @invariant()
    def no_block_is_writable_by_two_or_while_published(self) -> None:
        for holder in self.holders:
            for i, block in enumerate(holder.table):
                if self.pool.is_writable(block):
                    assert self.pool.ref_count(block) == 1
                    assert i >= holder.num_published

    @invariant()
    def cached_hash_recomputes_from_its_tokens_and_has_its_parent(self) -> None:
        for block_hash in self.pool.snapshot().stored:
            tokens = self.tokens_of[block_hash]
            chain = hash_blocks(tokens, root=self.root_of[block_hash], block_size=BLOCK_SIZE)
            assert chain[-1] == block_hash
            assert len(self.pool.match_prefix(chain)) == len(chain), "a cached block without its parent"

    @invariant()
    def books_of_free_pages_are_exact(self) -> None:
        stored = [self.pool.block_of(each) for each in self.pool.snapshot().stored]
        parents = [self.pool.parent_of(each) for each in stored]
        assert list(self.pool._num_children) == [parents.count(page) for page in range(NUM_BLOCKS)]  # noqa: SLF001
        order = self.pool._cached  # noqa: SLF001
        pinned = self.pool.pins.free if self.pool.pins is not None else {}
        free = {page for page in stored if not self.pool.ref_count(page) and page not in pinned}
        assert {page for page in range(NUM_BLOCKS) if page in order} == free
        assert len(order) == len(free) == len(order._put_s) + len(order._strands)  # noqa: SLF001
        for page, strand in order._strands.items():  # noqa: SLF001
            assert page in strand.pages
            assert strand.is_parked == (order._parked.get(order._last(strand)) is strand)  # noqa: SLF001
            assert strand.num_pages == sum(each is strand for each in order._strands.values())  # noqa: SLF001
        for page, strand in order._parked.items():  # noqa: SLF001
            assert order._strands[page] is strand  # noqa: SLF001
        for heap in (order._ranked, order._due):  # noqa: SLF001
            assert len(heap.entries) <= 64 + 3 * NUM_BLOCKS

    @invariant()
    def events_add_up_to_the_snapshot(self) -> None:
        events = self.pool.drain_events()
        self.cached_at_router -= set(events.removed)
        self.cached_at_router |= set(events.stored)
        assert self.cached_at_router == set(self.pool.snapshot().stored)


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBlockPool = PoolMachine.TestCase


def _published(pool: BlockPool, tokens: list[int], root: HashRoot = ROOT) -> list[BlockId]:
    hashes = hash_blocks(tokens, root=root, block_size=BLOCK_SIZE)
    table = pool.allocate(len(hashes))
    for i, (block, block_hash) in enumerate(zip(table, hashes, strict=True)):
        assert pool.publish(block, block_hash, behind=table[i - 1] if i else None, root=root) == block
    return table


def test_allocate_when_full_of_cached_blocks_evicts_least_recently_used_tail_first() -> None:
    pool = BlockPool(4)
    old, new = _published(pool, [0, 0, 0, 1]), _published(pool, [1, 1, 1, 0])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    assert pool.match_prefix(hash_blocks([1, 1, 1, 0], root=ROOT, block_size=BLOCK_SIZE)) == [new[0]]


def test_allocate_prefers_uncached_pages_over_cached_ones() -> None:
    pool = BlockPool(3)
    cached = _published(pool, [0, 1])
    scratch = pool.allocate(2)
    pool.release(cached)
    pool.release(scratch)
    assert set(pool.allocate(2)) == set(scratch)
    assert pool.num_cached_blocks == 1


def test_release_below_zero_is_asserted_with_the_count() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="ref_cnt -1"):
        pool.release(table)


def test_allocate_takes_brief_blocks_before_older_kept_ones() -> None:
    pool = BlockPool(4)
    kept, brief = _published(pool, [0, 0, 0, 1]), _published(pool, [1, 1, 1, 0])
    pool.release(kept)
    pool.release(brief, Keeping(num_front=1, end=EvictionClass.BRIEF))
    assert pool.allocate(3) == [brief[1], kept[1], kept[0]]


def test_release_keeps_brief_blocks_that_were_used_again() -> None:
    pool = BlockPool(4)
    first, second = _published(pool, [0, 0, 0, 1]), _published(pool, [1, 1, 1, 0])
    pool.release(first, KEEP_BRIEFLY)
    pool.acquire([first[0]])
    pool.mark_reused(first, 1)
    pool.release([first[0]], KEEP_BRIEFLY)
    pool.release(second, KEEP_BRIEFLY)
    assert pool.num_cold == 3
    assert pool.allocate(4) == [first[1], second[1], second[0], first[0]]


def test_block_that_two_samples_computed_does_not_outlive_its_parent() -> None:
    pool = BlockPool(3)
    hashes = hash_blocks([0, 0, 0, 1], root=ROOT, block_size=BLOCK_SIZE)
    (parent,) = pool.allocate(1)
    pool.publish(parent, hashes[0], behind=None)
    pool.acquire([parent])
    first, second = pool.allocate(2)
    pool.publish(first, hashes[1], behind=parent)
    assert pool.publish(second, hashes[1], behind=parent) == first
    pool.acquire([first])
    pool.mark_reused([parent, first], 2)
    for table in ([second], [parent, first], [parent, first]):
        pool.release(table, KEEP_BRIEFLY)
    assert pool.allocate(3) == [second, first, parent]


def test_sharing_within_a_request_does_not_count_as_reuse() -> None:
    pool = BlockPool(2)
    table = _published(pool, [0, 0, 0, 1])
    pool.acquire(table)
    pool.release(table)
    pool.release(table)
    assert pool.num_cold == 2


def test_long_prompts_that_come_once_leave_a_shared_prefix_in_the_cache() -> None:
    pool = BlockPool(40)
    shared = _published(pool, [0] * 20)
    pool.release(shared)
    for _ in range(2):
        pool.acquire(shared)
        pool.mark_reused(shared, len(shared))
        pool.release(shared)
    for token in (2, 3):
        once = _published(pool, [token] * 60)
        pool.release(once, Keeping(num_front=3))
    assert pool.match_prefix(hash_blocks([0] * 20, root=ROOT, block_size=BLOCK_SIZE)) == shared
    assert len(pool.match_prefix(hash_blocks([3] * 60, root=ROOT, block_size=BLOCK_SIZE))) == 30


def test_forgetting_a_root_leaves_the_cached_blocks_of_others_and_those_in_use() -> None:
    pool = BlockPool(6)
    ours, theirs, held = (
        _published(pool, [0, 0, 0, 1]),
        _published(pool, [0, 0, 0, 1], OTHER),
        _published(pool, [1, 1]),
    )
    pool.release(ours)
    pool.release(theirs)
    forgotten = pool.forget(ROOT)
    assert (forgotten.num_blocks, forgotten.is_in_use) == (2, True)
    assert pool.match_prefix(hash_blocks([0, 0, 0, 1], root=ROOT, block_size=BLOCK_SIZE)) == []
    assert pool.match_prefix(hash_blocks([0, 0, 0, 1], root=OTHER, block_size=BLOCK_SIZE)) == theirs
    pool.release(held)
    assert pool.forget(ROOT) == ForgottenPages(num_blocks=1)

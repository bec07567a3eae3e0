"""BlockPool as a state machine: sequences over a two-token vocabulary, eight blocks of two tokens."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.block_hash import hash_blocks, hash_root
from common.ids import BlockHash, BlockId
from engine.block_pool import BlockPool, Retention

ROOT = hash_root(model_fingerprint="test")
BLOCK_SIZE = 2
NUM_BLOCKS = 8


@dataclass
class Holder:
    tokens: list[int]
    table: list[BlockId]
    num_published: int = 0
    hashes: list[BlockHash] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[Holder] = []
        self.tokens_of: dict[BlockHash, tuple[int, ...]] = {}
        self.cached_at_router: set[BlockHash] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def admit(self, tokens: list[int]) -> None:
        hashes = list(hash_blocks(tokens, root=ROOT, block_size=BLOCK_SIZE))
        cached = self.pool.match_prefix(hashes)
        num_fresh = -(-len(tokens) // BLOCK_SIZE) - len(cached)
        if num_fresh > self.pool.num_free - self.pool.num_matched_free(cached):
            return
        for i, block_hash in enumerate(hashes):
            self.tokens_of[block_hash] = tuple(tokens[: (i + 1) * BLOCK_SIZE])
        self.pool.acquire(cached)
        table = [*cached, *self.pool.allocate(num_fresh)]
        self.holders.append(Holder(tokens, table, len(cached), hashes))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish_next(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        i = holder.num_published
        if i < len(holder.hashes):
            published = self.pool.publish(holder.table[i], holder.hashes[i])
            if published != holder.table[i]:
                self.pool.acquire([published])
                self.pool.release([holder.table[i]])
                holder.table[i] = published
            holder.num_published += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.acquire(holder.table)
        copy = Holder(list(holder.tokens), list(holder.table), holder.num_published, list(holder.hashes))
        self.holders.append(copy)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.table, data.draw(st.sampled_from(Retention)))

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
            chain = hash_blocks(tokens, root=ROOT, block_size=BLOCK_SIZE)
            assert chain[-1] == block_hash
            assert len(self.pool.match_prefix(chain)) == len(chain), "a cached block without its parent"

    @invariant()
    def events_add_up_to_the_snapshot(self) -> None:
        events = self.pool.drain_events()
        self.cached_at_router -= set(events.removed)
        self.cached_at_router |= set(events.stored)
        assert self.cached_at_router == set(self.pool.snapshot().stored)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockPool = PoolMachine.TestCase


def _published(pool: BlockPool, tokens: list[int]) -> list[BlockId]:
    hashes = hash_blocks(tokens, root=ROOT, block_size=BLOCK_SIZE)
    table = pool.allocate(len(hashes))
    for block, block_hash in zip(table, hashes, strict=True):
        assert pool.publish(block, block_hash) == block
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
    assert pool.num_cached == 1


def test_publish_when_another_page_has_the_hash_keeps_the_first() -> None:
    pool = BlockPool(2)
    (first,) = _published(pool, [0, 1])
    (second,) = pool.allocate(1)
    (block_hash,) = hash_blocks([0, 1], root=ROOT, block_size=BLOCK_SIZE)
    assert pool.publish(second, block_hash) == first
    assert pool.block_with(block_hash) == first
    assert pool.is_writable(second)


def test_release_below_zero_is_our_own_bug_and_says_so() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="ref_cnt -1"):
        pool.release(table)


def test_allocate_takes_brief_blocks_before_older_kept_ones() -> None:
    pool = BlockPool(4)
    kept, brief = _published(pool, [0, 0, 0, 1]), _published(pool, [1, 1, 1, 0])
    pool.release(kept)
    pool.release(brief, Retention.BRIEF)
    assert pool.num_cold == 2
    assert pool.allocate(3) == [brief[1], brief[0], kept[1]]


def test_release_keeps_brief_blocks_that_were_used_again() -> None:
    pool = BlockPool(4)
    first, second = _published(pool, [0, 0, 0, 1]), _published(pool, [1, 1, 1, 0])
    pool.release(first, Retention.BRIEF)
    pool.acquire([first[0]])
    pool.release([first[0]], Retention.BRIEF)
    pool.release(second, Retention.BRIEF)
    assert pool.allocate(4) == [first[1], second[1], second[0], first[0]]

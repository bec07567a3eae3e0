"""Pins of cached pages beside a plain account of them: who has pinned what until when, and what goes before them."""

import pickle
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from common.ids import BlockHash, BlockId, HashRoot
from engine.cache_marks import CacheMark, CacheMarks
from engine.core import EngineCore
from engine.events import Started, Tokens
from engine.pages.block_pool import KEEP_ALL, BlockPool
from engine.pages.cache_pins import MAX_PINNED_SHARE, CachePins
from engine.request import EngineRequest
from tests.builders import Collector, make_core, make_request
from tests.clock import ManualClock
from tests.engine.test_block_pool import BLOCK_SIZE, NUM_BLOCKS, OTHER, ROOT, PoolMachine, _published

MAX_BLOCKS = 3
TENANTS = {ROOT: "a", OTHER: "b"}


@dataclass
class Expected:
    until_s: float
    ttl_s: float


class PinMachine(PoolMachine):
    """The pool's machine, where requests pin what they hold and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.pins = CachePins(NUM_BLOCKS, self.clock)
        self.pool = BlockPool(NUM_BLOCKS, pins=self.pins, clock=self.clock)
        self.expected: dict[str, dict[BlockHash, Expected]] = {"a": {}, "b": {}}

    @rule(seconds=st.sampled_from([1.0, 7.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def settle(self) -> None:
        """Have both accounts forget what is over, or was evicted."""
        self.pool.allocate(0)
        stored, now_s = set(self.pool.snapshot().stored), self.clock.monotonic()
        for pins in self.expected.values():
            for each in [each for each, pin in pins.items() if pin.until_s <= now_s or each not in stored]:
                del pins[each]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True))
    def pin(self, data: st.DataObject, lengths: list[int]) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        marks = tuple(
            CacheMark(num_blocks=min(length, holder.num_published), ttl_s=data.draw(st.sampled_from([5.0, 20.0, 50.0])))
            for length in sorted(lengths)
        )
        self.settle()
        tenant = TENANTS[holder.root]
        given = CacheMarks(tenant=tenant, max_blocks=MAX_BLOCKS, marks=marks)
        num_pinned = self.pool.pin(given, holder.table)
        pins, now_s, num_expected = self.expected[tenant], self.clock.monotonic(), 0
        for place, block_hash in enumerate(holder.hashes[: given.num_blocks]):
            ttl_s = max(mark.ttl_s for mark in marks if mark.num_blocks > place)
            pinned = {each for all_pins in self.expected.values() for each in all_pins}
            if block_hash not in pins:
                is_full = block_hash not in pinned and len(pinned) >= MAX_PINNED_SHARE * NUM_BLOCKS
                if len(pins) >= MAX_BLOCKS or is_full:
                    break
                pins[block_hash] = Expected(0.0, 0.0)
            pins[block_hash].ttl_s = max(pins[block_hash].ttl_s, ttl_s)
            pins[block_hash].until_s = max(pins[block_hash].until_s, now_s + pins[block_hash].ttl_s)
            num_expected += 1
        assert num_pinned == num_expected

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        tenant = TENANTS[holder.root]
        self.pins.touch(CacheMarks(tenant=tenant, max_blocks=MAX_BLOCKS), holder.table[: holder.num_published])
        self.settle()
        for block_hash in holder.hashes[: holder.num_published]:
            if (pin := self.expected[tenant].get(block_hash)) is not None:
                pin.until_s = max(pin.until_s, self.clock.monotonic() + pin.ttl_s)

    @invariant()
    def pins_are_those_of_the_account(self) -> None:
        self.settle()
        assert self.pins.counts() == {tenant: len(pins) for tenant, pins in self.expected.items() if pins}
        pinned = {each for pins in self.expected.values() for each in pins}
        assert self.pins.num_blocks == len(pinned) <= MAX_PINNED_SHARE * NUM_BLOCKS
        free = {self.pool.hash_of(each) for each in self.pins.free}
        assert free == {each for each in pinned if not self.pool.ref_count(self.pool.block_of(each))}


PinMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCachePins = PinMachine.TestCase


def pinned_pool(num_blocks: int, *, ttl_s: float = 10.0) -> tuple[BlockPool, ManualClock, list[BlockId]]:
    """Return a pool with free pages of which the two of one prompt are pinned."""
    clock = ManualClock()
    pool = BlockPool(num_blocks, pins=CachePins(num_blocks, clock))
    table = _published(pool, [1, 1, 2, 2])
    mark = CacheMark(num_blocks=2, ttl_s=ttl_s)
    assert pool.pin(CacheMarks(tenant="a", max_blocks=num_blocks, marks=(mark,)), table) == 2
    pool.release(table, KEEP_ALL)
    return pool, clock, table


def store(pool: BlockPool, tokens: list[int], root: HashRoot = ROOT) -> None:
    pool.release(_published(pool, tokens, root))


def test_pinned_pages_outlive_all_others_while_there_are_others() -> None:
    pool, clock, table = pinned_pool(4)
    for token in range(3, 40):
        store(pool, [token] * 2 * BLOCK_SIZE)
        assert all(pool.pins is not None and pool.pins.holds(each) for each in table)
    clock.advance(10.0)
    store(pool, [90] * 2 * BLOCK_SIZE)
    store(pool, [91] * 4 * BLOCK_SIZE)
    assert pool.pins is not None and not pool.pins.holds(table[0]) and pool.pins.num_evicted == 0


def test_request_that_needs_every_page_gets_the_pinned_ones_from_the_last_block_on() -> None:
    pool, _clock, table = pinned_pool(4)
    assert pool.num_free == 4
    assert pool.allocate(3)[-1] == table[1]
    assert pool.pins is not None and (pool.pins.num_evicted, pool.pins.counts()) == (1, {"a": 1})
    assert pool.allocate(1) == [table[0]]
    assert pool.pins.counts() == {}


def test_pins_that_are_renewed_for_a_day_take_no_more_memory() -> None:
    pool, clock, table = pinned_pool(8, ttl_s=86400.0)
    mark = CacheMarks(tenant="a", max_blocks=8, marks=(CacheMark(num_blocks=2, ttl_s=86400.0),))
    for _ in range(500):
        clock.advance(1.0)
        pool.forget(ROOT)
        table = _published(pool, [1, 1, 2, 2])
        assert pool.pin(mark, table) == 2
        pool.release(table)
    size = len(pickle.dumps(pool.pins))
    assert size < 4096, f"500 pins in turn are kept in {size} bytes"


def serve(core: EngineCore, request: EngineRequest) -> Collector:
    """Let a core answer a request, and return what it told."""
    sink = Collector()
    core.add(request, sink)
    while core.has_work:
        for _group, event in core.step():
            sink(event)
    return sink


def test_request_that_needs_most_pages_is_served_at_once_beside_pins() -> None:
    core = make_core(num_blocks=12)
    marks = CacheMarks(tenant="a", max_blocks=99, marks=(CacheMark(num_blocks=5, ttl_s=3600.0),))
    pinned = replace(make_request(range(1, 23)), cache_marks=marks)
    told = serve(core, pinned)
    assert sum(event.num_pinned_tokens for event in told.events if isinstance(event, Tokens)) == 5 * 4
    large = make_request(range(50, 90), max_tokens=4, ignore_eos=True)
    assert len(serve(core, large).token_ids()) == 4
    load = core.load()
    assert (load.num_preemptions, load.num_evicted_pins, dict(load.tenant_pins)) == (0, 4, {"a": 1})
    again = serve(core, pinned)
    assert next(event for event in again.events if isinstance(event, Started)).num_cached_tokens == 4


def test_every_use_by_its_tenant_renews_a_pin_and_none_by_another_does() -> None:
    clock = ManualClock()
    core = make_core(num_blocks=32, clock=clock)
    marks = CacheMarks(tenant="a", max_blocks=99, marks=(CacheMark(num_blocks=5, ttl_s=60.0),))
    request = make_request(range(1, 23), max_tokens=2)
    serve(core, replace(request, cache_marks=marks))
    clock.advance(50.0)
    serve(core, replace(request, cache_marks=replace(marks, marks=())))
    clock.advance(50.0)
    serve(core, replace(request, cache_marks=replace(marks, tenant="b", marks=())))
    assert core.load().tenant_pins == {"a": 5}
    clock.advance(11.0)
    assert (core.load().tenant_pins, core.load().num_pinned_blocks) == ({}, 0)


def test_tenant_that_may_pin_less_than_before_does_not_keep_the_rest_by_using_it() -> None:
    clock = ManualClock()
    core = make_core(num_blocks=32, clock=clock)
    marks = CacheMarks(tenant="a", max_blocks=99, marks=(CacheMark(num_blocks=5, ttl_s=60.0),))
    request = make_request(range(1, 23), max_tokens=2)
    serve(core, replace(request, cache_marks=marks))
    for num_pinned in (5, 3):
        clock.advance(40.0)
        serve(core, replace(request, cache_marks=replace(marks, max_blocks=3)))
        assert core.load().tenant_pins == {"a": num_pinned}

"""Reused prefixes: how often, by whom they are held, and within which memory."""

from router.fleet.hot_prefixes import CAPACITY, SHOWN, HotPrefixes
from router.fleet.index import PrefixIndex
from tests.clock import ManualClock
from tests.router.test_index import A, B, block, blocks, store


def test_prefix_that_many_reuse_comes_first_with_what_each_worker_holds() -> None:
    clock, index = ManualClock(), PrefixIndex()
    store(index, A, 1, 2, 3)
    store(index, B, 1)
    prefixes = HotPrefixes(clock, index.match)
    prefixes.note(blocks(7, 8), 2)
    for own in (10, 11):
        prefixes.note(blocks(1, 2, 3, own), 3)
    clock.advance(60.0)

    first, second = prefixes.hottest()

    assert (first.num_blocks, first.num_requests, first.age_s) == (3, 1.0, 60.0)
    assert [(each.worker_id, each.num_blocks) for each in first.holders] == [(A, 3), (B, 1)]
    assert block(3).hex().startswith(first.digest)
    assert (second.num_blocks, second.holders) == (2, ())


def test_request_that_found_nothing_reuses_nothing() -> None:
    prefixes = HotPrefixes(ManualClock(), PrefixIndex().match)
    prefixes.note(blocks(1, 2), 0)
    assert prefixes.hottest() == []


def test_coldest_prefix_makes_room_and_few_are_told() -> None:
    clock = ManualClock()
    prefixes = HotPrefixes(clock, PrefixIndex().match)
    for _ in range(3):
        prefixes.note(blocks(0), 1)
    for number in range(1, CAPACITY + 20):
        clock.advance(0.1)
        prefixes.note(blocks(number), 1)
    told = prefixes.hottest()
    assert len(told) == SHOWN
    assert block(0).hex().startswith(told[0].digest)

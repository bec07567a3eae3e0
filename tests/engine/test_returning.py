"""The order of cached pages of which it is known when they may be asked for again."""

import random

import pytest

from common.block_hash import hash_blocks, hash_root
from common.eviction import EvictionClass, EvictionOrder
from common.ids import BlockHash, BlockId
from common.return_curve import ReturnCurve
from engine.pages.block_pool import BlockPool
from engine.pages.hot_prefixes import hot_prefixes
from engine.pages.returning import ReturningOrder
from tests.clock import ManualClock

ROOT = hash_root(model_fingerprint="test")
SOON, LATER = ReturnCurve(like_s=(1.0,), ages_s=()), ReturnCurve(like_s=(1000.0,), ages_s=())


def _turn(pool: BlockPool, tokens: list[int]) -> tuple[list[BlockHash], list[BlockId]]:
    """Serve a prompt of one-token blocks, and leave its pages in the cache."""
    hashes = list(hash_blocks(tokens, root=ROOT, block_size=1))
    cached = pool.match_prefix(hashes)
    pool.acquire(cached)
    pool.mark_reused(cached, len(cached))
    table = [*cached, *pool.allocate(len(hashes) - len(cached))]
    for i in range(len(cached), len(table)):
        pool.publish(table[i], hashes[i], behind=table[i - 1] if i else None)
    pool.release(table)
    return hashes, table


def test_session_of_a_tool_call_outlives_a_younger_one_that_waits_for_a_person() -> None:
    clock = ManualClock()
    pool = BlockPool(6, clock=clock)
    tool, tool_pages = _turn(pool, [1, 2, 3])
    pool.expect_return(tool[-1:], SOON)
    clock.advance(5.0)
    person, person_pages = _turn(pool, [4, 5, 6])
    pool.expect_return(person[-1:], LATER)
    assert pool.allocate(4) == [*reversed(person_pages), tool_pages[-1]]
    assert pool.match_prefix(tool) == tool_pages[:2]


def test_session_that_stays_away_loses_its_place_as_it_ages() -> None:
    clock = ManualClock()
    pool = BlockPool(4, clock=clock)
    away, away_pages = _turn(pool, [1, 2])
    pool.expect_return(away[-1:], ReturnCurve(like_s=(1.0, 500.0), ages_s=(60.0,)))
    other, other_pages = _turn(pool, [3, 4])
    pool.expect_return(other[-1:], ReturnCurve(like_s=(30.0,), ages_s=()))
    clock.advance(30.0)
    (taken,) = pool.allocate(1)
    assert taken == other_pages[1]
    clock.advance(40.0)
    assert pool.allocate(1) == [away_pages[1]]


def test_pages_without_knowledge_go_by_their_age_beside_those_with_it() -> None:
    clock = ManualClock()
    pool = BlockPool(6, clock=clock)
    _, old = _turn(pool, [1, 2])
    clock.advance(50.0)
    known, known_pages = _turn(pool, [3, 4])
    pool.expect_return(known[-1:], ReturnCurve(like_s=(20.0,), ages_s=()))
    _, young = _turn(pool, [5, 6])
    assert pool.allocate(6) == [*reversed(old), *reversed(known_pages), *reversed(young)]


@pytest.mark.parametrize("seed", range(5))
def test_without_knowledge_the_order_is_the_usual_one(seed: int) -> None:
    rng, clock = random.Random(seed), ManualClock()
    ours, usual, inside = ReturningOrder(lambda _page: False, clock), EvictionOrder[int](), list[int]()
    for page in range(500):
        clock.advance(rng.random())
        segment = rng.choice(list(EvictionClass))
        ours.put(page, segment)
        usual.put(page, segment)
        inside.append(page)
        if rng.random() < 0.3:
            used = inside.pop(rng.randrange(len(inside)))
            ours.remove(used)
            usual.remove(used)
        if rng.random() < 0.6 and inside:
            assert ours.least_value() == usual.least_value()
            evicted = usual.evict()
            assert ours.evict() == evicted
            inside.remove(evicted)
    assert list(ours.by_value()) == list(usual.by_value())


@pytest.mark.parametrize("seed", range(20))
def test_pages_go_as_a_naive_reference_says(seed: int) -> None:
    """Chains of one page each: the greatest likeness goes first, of equal ones the strand that changed to it first."""
    rng, clock = random.Random(seed), ManualClock()
    order = ReturningOrder(lambda _page: False, clock)
    ends: dict[int, tuple[float, ReturnCurve]] = {}
    for page in range(400):
        clock.advance(rng.random() * 3)
        order.put(page, EvictionClass.WARM)
        steps = rng.randrange(1, 4)
        like_s = tuple(rng.random() * 100 for _ in range(steps))
        curve = ReturnCurve(like_s=like_s, ages_s=tuple(sorted(rng.random() * 90 for _ in range(steps - 1))))
        order.expect([page], curve)
        ends[page] = clock.monotonic(), curve
        if rng.random() < 0.2:
            used = rng.choice(list(ends))
            order.remove(used)
            del ends[used]
        if len(ends) > 30:
            likeness = {page: _like_s(curve, clock.monotonic() - at_s) for page, (at_s, curve) in ends.items()}
            evicted = order.evict()
            assert likeness[evicted] == max(likeness.values())
            del ends[evicted]
        assert len(order) == len(ends)


def _like_s(curve: ReturnCurve, age_s: float) -> float:
    return curve.like_s[sum(each <= age_s for each in curve.ages_s)]


def test_shared_beginning_stays_while_another_session_needs_it() -> None:
    clock = ManualClock()
    pool = BlockPool(5, clock=clock)
    kept, kept_pages = _turn(pool, [1, 2, 3])
    pool.expect_return(kept[-1:], SOON)
    ended, ended_pages = _turn(pool, [1, 2, 4])
    pool.expect_return(ended[-1:], LATER)  # the beginning is in its strand now
    pool.allocate(1)
    assert pool.allocate(1) == [ended_pages[2]]
    assert pool.match_prefix(kept) == kept_pages
    assert pool.allocate(3) == [kept_pages[2], kept_pages[1], kept_pages[0]]


def test_beginning_that_others_pulled_outlives_the_session_behind_it() -> None:
    clock = ManualClock()
    pool = BlockPool(3, clock=clock)
    hashes = hash_blocks([1, 2, 3], root=ROOT, block_size=1)
    table = pool.allocate(3)
    for i, each in enumerate(hashes):
        pool.publish(table[i], each, behind=table[i - 1] if i else None)
    pool.acquire(table[:2])  # a pull, which does not count as reuse
    pool.release(table)
    pool.expect_return(hashes[-1:].digests(), SOON)
    pool.release(table[:2])
    clock.advance(5.0)
    assert [pool.allocate(1)[0] for _ in range(3)] == table[::-1]


def test_order_without_a_last_page_still_gives_each_page_once() -> None:
    order = ReturningOrder(lambda _page: True, ManualClock())
    for page in range(6):
        order.put(page, EvictionClass.WARM)
    order.expect([0, 1], SOON)
    order.expect([2], LATER)
    assert sorted(order.evict() for _ in range(6)) == list(range(6))
    with pytest.raises(KeyError):
        order.evict()


def test_session_that_is_in_use_again_is_not_told_to_wait() -> None:
    pool = BlockPool(3, clock=ManualClock())
    hashes, pages = _turn(pool, [1, 2])
    pool.acquire(pages)
    pool.expect_return(hashes[-1:], LATER)
    pool.expect_return([BlockHash(bytes(16))], LATER)
    pool.release(pages)
    assert pool.num_cached_blocks == 2
    assert pool.match_prefix(hashes) == pages


def test_leaving_worker_hands_over_sessions_that_come_back_before_those_that_do_not() -> None:
    clock = ManualClock()
    pool = BlockPool(4, clock=clock)
    for tokens, curve in ([1, 2], LATER), ([3, 4], SOON):
        hashes, _ = _turn(pool, tokens)
        pool.expect_return(hashes[-1:], curve)
    clock.advance(10.0)
    (chain,) = hot_prefixes(pool, (), 2)
    assert list(chain.hashes) == list(hash_blocks([3, 4], root=ROOT, block_size=1))

"""The eviction policy by itself: order, classes, what new blocks displace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.eviction import MAX_AGE, Displaced, EvictionOrder, Segment, displaced, num_admitted


def order_of(*entries: tuple[str, Segment]) -> EvictionOrder[str]:
    order: EvictionOrder[str] = EvictionOrder()
    for key, segment in entries:
        order.put(key, segment)
    return order


def test_brief_blocks_go_first_however_young() -> None:
    order = order_of(("warm", Segment.WARM), ("cold", Segment.COLD), ("first", Segment.BRIEF), ("last", Segment.BRIEF))
    assert [order.evict() for _ in range(2)] == ["first", "last"]


@pytest.mark.parametrize("segment", [Segment.TAIL, Segment.WARM])
def test_block_becomes_as_old_as_its_segment_may_relative_to_cold_ones(segment: Segment) -> None:
    order: EvictionOrder[int | str] = EvictionOrder()
    for now in range(100):  # cold blocks become 100 evictions old
        order.put(now, Segment.COLD)
    evicted: list[int | str] = []
    for now in range(100, 450):
        order.put(now, Segment.COLD)
        if now == 200:
            order.put("other", segment)
        evicted.append(order.evict())
    assert evicted.index("other") - 100 == pytest.approx(100 * MAX_AGE[segment], abs=3)


def test_removed_block_is_not_evicted() -> None:
    order = order_of(("a", Segment.BRIEF), ("b", Segment.TAIL), ("c", Segment.WARM), ("d", Segment.COLD))
    for key in "abc":
        order.remove(key)
    assert (len(order), order.evict()) == (1, "d")
    with pytest.raises(KeyError):
        order.evict()
    with pytest.raises(KeyError):
        order.remove("a")


def test_small_caches_admit_whole_short_prompts_and_large_ones_a_share() -> None:
    assert [num_admitted(size) for size in (10, 200, 1000, 3000)] == [16, 16, 40, 120]


@given(*[st.integers(0, 50)] * 4)
def test_displaced_blocks_are_what_does_not_fit_and_never_more_than_there_is(
    num_new: int, num_empty: int, num_cold: int, num_warm: int
) -> None:
    lost = displaced(num_new, num_empty=num_empty, num_cold=num_cold, num_warm=num_warm)
    assert lost.num_cold + lost.num_warm == min(max(0, num_new - num_empty), num_cold + num_warm)
    assert 0 <= lost.num_cold <= num_cold
    assert 0 <= lost.num_warm <= num_warm


def test_prediction_of_what_a_prompt_displaces_is_what_a_full_cache_does_in_the_long_run() -> None:
    order: EvictionOrder[int] = EvictionOrder()
    num_predicted = num_evicted = 0
    warm: set[int] = set()
    for now in range(6000):
        segment = Segment.WARM if now % 3 == 0 else Segment.COLD
        if segment is Segment.WARM:
            warm.add(now)
        order.put(now, segment)
        if len(order) > 600:
            num_warm = order.count(Segment.WARM)
            if now % 60 == 0:
                lost = displaced(60, num_empty=0, num_cold=len(order) - num_warm, num_warm=num_warm)
                num_predicted += lost.num_warm
            num_evicted += order.evict() in warm
    assert displaced(5, num_empty=8, num_cold=3, num_warm=3) == Displaced(num_cold=0, num_warm=0)
    # A third of what comes is warm, so a third of what goes is; of what is there, half, since it stays twice as long.
    assert order.count(Segment.WARM) == pytest.approx(300, abs=3)
    assert num_evicted == pytest.approx(1800, rel=0.1)
    assert num_predicted == pytest.approx(2700, rel=0.1)

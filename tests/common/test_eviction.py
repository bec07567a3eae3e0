"""The eviction policy alone: order and segments."""

import pytest

from common.eviction import MAX_AGE, EvictionClass, EvictionOrder, num_admitted


@pytest.mark.parametrize("segment", [EvictionClass.TAIL, EvictionClass.WARM])
def test_block_reaches_the_age_of_its_segment_relative_to_cold_ones(segment: EvictionClass) -> None:
    order: EvictionOrder[int | str] = EvictionOrder()
    for now in range(100):  # cold blocks become 100 evictions old
        order.put(now, EvictionClass.COLD)
    evicted: list[int | str] = []
    for now in range(100, 450):
        order.put(now, EvictionClass.COLD)
        if now == 200:
            order.put("other", segment)
        evicted.append(order.evict())
    assert evicted.index("other") - 100 == pytest.approx(100 * MAX_AGE[segment], abs=3)


def test_small_caches_admit_whole_short_prompts_and_large_ones_a_share() -> None:
    assert [num_admitted(size) for size in (10, 200, 1000, 3000)] == [16, 16, 40, 120]

"""Pools whose prompts come back from tiers: another size has other tiers, and so another hit rate and load."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planner.capacity import workers_for
from cluster.planner.plan import Pool, PoolSizes
from cluster.planner.prefill_capacity import PrefillCapacity
from cluster.planner.slo_planner import SloPlanner
from cluster.planner.tier_hits import TierHits, tier_hits
from common.demand import RequestShape
from common.timing import LinkModel
from tests.cluster.planner.support import INTERVAL_S, SETTINGS, TIMING, make_demand, make_observation
from tests.cluster.planner.test_capacity import OBJECTIVES, prefill_of

FULL = TierHits(num_workers=4, num_blocks=1000, max_blocks=1000, max_blocks_each=250.0, token_bytes=1e5)
READING = RequestShape(
    num_prompt_tokens=10_000,
    num_computed_tokens=4000,
    num_output_tokens=10,
    num_read_tokens=6000,
    num_evicted_tokens=2000,
)


def capacity_of(tiers: TierHits, shape: RequestShape = READING) -> PrefillCapacity:
    return PrefillCapacity(TIMING, [shape], OBJECTIVES, tiers=tiers)


@given(st.integers(1, 400), st.integers(0, 6000), st.integers(0, 4000))
def test_larger_pool_with_full_tiers_computes_no_more_and_at_least_what_is_new(size: int, read: int, out: int) -> None:
    shape = replace(READING, num_read_tokens=read, num_evicted_tokens=out)
    (seen,), (more,) = (FULL.with_workers([shape], each) for each in (size, size + 1))
    assert seen.num_computed_tokens >= more.num_computed_tokens >= shape.num_computed_tokens - out
    assert seen.num_computed_tokens <= shape.num_computed_tokens + read
    assert seen.num_read_tokens + seen.num_computed_tokens == read + shape.num_computed_tokens
    assert FULL.with_workers([shape], 4) == [shape]


def test_half_of_full_tiers_keep_more_than_half_of_what_is_asked_for_again() -> None:
    (half,) = FULL.with_workers([READING], 2)
    assert 3000 < half.num_read_tokens < 6000
    (endless,) = FULL.with_workers([READING], 400)
    assert endless.num_computed_tokens == 2000


def test_tiers_with_room_keep_as_much_until_a_smaller_pool_cannot_hold_it() -> None:
    roomy = replace(FULL, num_blocks=500)
    assert [roomy.room(size) for size in (1, 2, 3, 4, 9)] == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_pool_that_would_lose_tiers_needs_more_workers_than_one_that_keeps_them() -> None:
    own, elsewhere = capacity_of(FULL), capacity_of(replace(FULL, max_blocks_each=0.0))
    assert own.mean_work_s == elsewhere.mean_work_s
    assert (workers_for(own, 1.0), workers_for(elsewhere, 1.0)) == (3, 2)
    assert (workers_for(own, 8.0), workers_for(elsewhere, 8.0)) == (6, 7)  # more tiers than now


def test_slow_reads_take_time_of_the_request_but_none_of_the_worker() -> None:
    slow = replace(FULL, read=LinkModel(latency_s=0.0, bytes_per_s=1e8, num_samples=9))
    assert capacity_of(slow).mean_work_s == capacity_of(FULL).mean_work_s == prefill_of(READING).mean_work_s
    assert (capacity_of(FULL).reachable, capacity_of(slow).reachable) == (1.0, 0.0)


def test_plan_says_what_tiers_save_and_what_larger_ones_would() -> None:
    sizes, demand = PoolSizes(prefill=4, decode=1), make_demand(rate=1.0, shapes=[READING] * 8)
    observed = make_observation(INTERVAL_S, demand, sizes)
    workers = [
        replace(
            worker,
            timing=replace(TIMING, tier_read=LinkModel(latency_s=0.0, bytes_per_s=1e9, num_samples=9)),
            num_tier_blocks=250 if worker.pool is Pool.PREFILL else 0,
            max_tier_blocks=250 if worker.pool is Pool.PREFILL else 0,
            block_bytes=1_600_000,
        )
        for worker in observed.workers
    ]
    with_tiers = replace(observed, workers=tuple(workers))
    assert replace(tier_hits(with_tiers), read=FULL.read) == FULL
    plan = SloPlanner(SETTINGS).plan(with_tiers)
    terms = dict(plan.terms)
    assert (terms["tier_fill"], terms["tier_read_s"], terms["endless_tier_read_s"]) == pytest.approx((1.0, 0.6, 0.2))
    assert terms["tier_spared_prefill_s"] == pytest.approx(6000 * (1.025e-4 + 0.01 / 512))
    assert terms["endless_tier_spared_prefill_s"] == pytest.approx(2000 * (1.025e-4 + 0.01 / 512))
    assert "tiers spare a request 0.732 s of prefill for 0.6 s of reading" in plan.reason
    assert "larger tiers would spare up to 0.244 s of prefill for 0.2 s of reading" in plan.reason
    assert "guessed" not in plan.reason


def test_plan_without_tiers_says_what_they_would_save_and_that_the_rate_is_a_guess() -> None:
    demand = make_demand(rate=1.0, shapes=[replace(READING, num_read_tokens=0)] * 8)
    observed = make_observation(INTERVAL_S, demand, PoolSizes(prefill=4, decode=1))
    observed = replace(observed, workers=tuple(replace(each, block_bytes=1_600_000) for each in observed.workers))
    reason = SloPlanner(SETTINGS).plan(observed).reason
    assert (
        "tiers (tiers.disk_gib, tiers.host_gib) would spare up to 0.244 s of prefill for 0.201 s of reading" in reason
    )
    assert "a guessed 1 GB/s: kvrelay doctor measures the disk" in reason
    assert (
        "tier"
        not in SloPlanner(SETTINGS)
        .plan(make_observation(1.0, make_demand(rate=1.0), PoolSizes(prefill=1, decode=1)))
        .reason
    )

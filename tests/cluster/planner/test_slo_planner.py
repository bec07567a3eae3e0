"""The planner's sizes: kept without evidence, within every limit, and the same for a load wherever they began."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planner.plan import Observation, PlannerSettings, Pool, PoolLimits, PoolSizes, WorkerPhase
from cluster.planner.slo_planner import SloPlanner
from common.demand import Demand
from common.timing import TimingModel
from tests.cluster.planner.support import (
    INTERVAL_S,
    ONE_EACH,
    SETTINGS,
    TIMING,
    FakePools,
    make_demand,
    make_observation,
    run,
    settle,
    settled,
    with_timing,
)

# Evidence.


_FEW = replace(make_demand(rate=50.0), shapes=make_demand(rate=50.0).shapes[:1])


@pytest.mark.parametrize(
    ("demand", "timing", "reason"),
    [
        (make_demand(rate=0.0, window_s=0.0), TIMING, "the routers have reported nothing yet"),
        (_FEW, TIMING, "requests have finished, 8 are needed to know their size"),
        (make_demand(rate=50.0), None, "no prefill worker has measured its own speed"),
    ],
    ids=["no reports", "few requests", "no speed"],
)
def test_plan_without_evidence_keeps_the_sizes_and_says_so(
    demand: Demand, timing: TimingModel | None, reason: str
) -> None:
    planner, sizes = SloPlanner(SETTINGS), PoolSizes(prefill=3, decode=2)
    for number in range(5):
        plan = planner.plan(with_timing(make_observation(number * INTERVAL_S, demand, sizes), timing))
        assert plan.sizes == sizes
        assert reason in plan.reason


def test_plan_without_evidence_still_keeps_to_the_limits() -> None:
    planner = SloPlanner(replace(SETTINGS, decode=PoolLimits(smallest=2, largest=4)))
    assert planner.plan(make_observation(0.0, make_demand(rate=0.0), ONE_EACH)).sizes.decode == 2


# Sizes.


def test_plan_for_a_load_that_both_pools_carry_changes_nothing() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(PoolSizes(prefill=2, decode=1))
    history = run(planner, pools, lambda _now_s: make_demand(rate=3.0), duration_s=600.0)
    assert {plan.sizes for _time_s, _serving, plan in history} == {PoolSizes(prefill=2, decode=1)}


def test_settled_pools_grow_with_the_load() -> None:
    sizes = [settled(rate) for rate in (1.0, 8.0, 40.0)]
    for smaller, larger in pairwise(sizes):
        assert smaller.prefill <= larger.prefill
        assert smaller.decode <= larger.decode
    assert sizes[0].prefill < sizes[-1].prefill
    assert sizes[0].decode < sizes[-1].decode


def test_settled_pools_do_not_depend_on_where_they_began() -> None:
    from_below, from_above = settled(20.0), settled(20.0, PoolSizes(prefill=14, decode=14))
    assert abs(from_above.prefill - from_below.prefill) <= 1
    assert abs(from_above.decode - from_below.decode) <= 1


@given(rate=st.floats(0.0, 100.0), prefill=st.integers(1, 20), decode=st.integers(1, 20))
@settings(max_examples=6, deadline=None)
def test_constant_load_once_settled_changes_nothing_any_more(rate: float, prefill: int, decode: int) -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(PoolSizes(prefill=prefill, decode=decode))
    # A pool that has nothing to judge by stays as it is; one that has finds its size within this time.
    sizes = settle(planner, pools, rate)
    history = run(planner, pools, lambda _now_s: make_demand(rate=rate), duration_s=600.0)
    assert {plan.sizes for _time_s, _serving, plan in history} == {sizes}


observations = st.builds(
    lambda rate, window_s, queued, good, burstiness: replace(
        make_demand(rate=rate, window_s=window_s, num_queued=queued),
        num_good=round(rate * window_s * good),
        burstiness=burstiness,
    ),
    st.floats(0.0, 200.0),
    st.floats(0.0, 60.0),
    st.integers(0, 5000),
    st.floats(0.0, 1.0),
    st.floats(0.0, 50.0),
)


@given(demands=st.lists(observations, min_size=1, max_size=15), start=st.tuples(st.integers(0, 60), st.integers(0, 60)))
@settings(max_examples=50, deadline=None)
def test_plan_of_anything_keeps_every_limit(demands: list[Demand], start: tuple[int, int]) -> None:
    limits = replace(
        SETTINGS, prefill=PoolLimits(smallest=2, largest=10), decode=PoolLimits(smallest=1, largest=12), max_workers=15
    )
    planner, pools = SloPlanner(limits), FakePools(PoolSizes(prefill=start[0], decode=start[1]))
    for demand in demands:
        before = pools.serving
        pools.advance(INTERVAL_S)
        plan = planner.plan(pools.observe(demand))
        pools.carry_out(plan.sizes)
        assert 2 <= plan.sizes.prefill <= 10
        assert 1 <= plan.sizes.decode <= 12
        if before.prefill + before.decode <= 15:
            assert plan.sizes.prefill + plan.sizes.decode <= 15
        assert plan.reason


# Both pools.


def test_worker_too_many_in_one_pool_covers_for_one_too_few_in_the_other() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(PoolSizes(prefill=1, decode=8))
    history = run(planner, pools, lambda _now_s: make_demand(rate=8.0), duration_s=30.0)
    first = next(plan for _time_s, _serving, plan in history if plan.sizes.prefill > 1)
    assert first.sizes.decode == 8 - (first.sizes.prefill - 1)
    assert "changes its role" in first.reason


def test_too_few_workers_for_both_are_split_so_that_neither_starves_and_stay_split() -> None:
    few = replace(SETTINGS, max_workers=8)
    planner, pools = SloPlanner(few), FakePools(PoolSizes(prefill=4, decode=4))
    history = run(planner, pools, lambda _now_s: make_demand(rate=100.0), duration_s=600.0)
    sizes = [plan.sizes for _time_s, _serving, plan in history]
    assert sizes[-1].prefill + sizes[-1].decode == 8
    assert len(set(sizes[10:])) == 1
    assert sizes[-1].prefill > sizes[-1].decode, "a prompt takes more of a worker than its answer"


# What the model does not know.


def missing(demand: Demand, *, tpot_p90_s: float) -> Demand:
    return replace(demand, num_good=demand.num_finished // 2, tpot_p90_s=tpot_p90_s)


@pytest.mark.parametrize(("tpot_p90_s", "grows"), [(0.012, Pool.PREFILL), (0.05, Pool.DECODE)])
def test_misses_that_the_model_did_not_foresee_make_the_guilty_pool_grow(tpot_p90_s: float, grows: Pool) -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(ONE_EACH)
    before = settle(planner, pools, 10.0)
    run(planner, pools, lambda _now_s: missing(make_demand(rate=10.0), tpot_p90_s=tpot_p90_s), duration_s=900.0)
    assert (pools.serving.prefill > before.prefill) is (grows is Pool.PREFILL)
    assert (pools.serving.decode > before.decode) is (grows is Pool.DECODE)


def test_misses_never_ask_for_more_than_twice_the_load() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(ONE_EACH)
    run(planner, pools, lambda _now_s: missing(make_demand(rate=5.0), tpot_p90_s=0.05), duration_s=2500.0)
    assert pools.serving.decode <= settled(10.0).decode + 1


def test_terms_and_reason_hold_the_numbers() -> None:
    planner = SloPlanner(replace(SETTINGS, decode_help=0.0))
    pools = FakePools(PoolSizes(prefill=4, decode=1))
    *_, (_time_s, _serving, plan) = run(planner, pools, lambda _now_s: make_demand(rate=8.0), duration_s=30.0)
    terms = dict(plan.terms)
    assert terms["requests_per_s"] == pytest.approx(8.0)
    assert terms["prefill_utilization"] == pytest.approx(0.5, rel=0.02)
    assert "8.00 requests/s come" in plan.reason
    assert "50% busy" in plan.reason


def test_pool_kept_too_small_by_its_limit_is_named() -> None:
    planner = SloPlanner(replace(SETTINGS, prefill=PoolLimits(smallest=1, largest=3)))
    pools = FakePools(PoolSizes(prefill=3, decode=4))
    *_, (_time_s, _serving, plan) = run(planner, pools, lambda _now_s: make_demand(rate=30.0), duration_s=30.0)
    assert plan.sizes.prefill == 3
    assert "prefill would need more than the 3 workers that are allowed" in plan.reason


def test_settings_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="max_workers 1"):
        replace(SETTINGS, max_workers=1)
    with pytest.raises(ValueError, match="attainment"):
        PlannerSettings(slo=SETTINGS.slo, attainment=1.0)
    with pytest.raises(ValueError, match="smallest 3"):
        PoolLimits(smallest=3, largest=2)


def test_observation_counts_the_phases_of_a_pool() -> None:
    observed: Observation = FakePools(PoolSizes(prefill=2, decode=3)).observe(make_demand(rate=1.0))
    assert observed.count(Pool.DECODE, WorkerPhase.SERVING) == 3


def test_prefill_counts_on_the_spare_time_of_decode_workers_where_they_help() -> None:
    sizes = {}
    for decode_help in (0.0, 1.0):
        planner = SloPlanner(replace(SETTINGS, decode_help=decode_help))
        *_, (_time_s, serving, _plan) = run(
            planner, FakePools(PoolSizes(prefill=4, decode=3)), lambda _now_s: make_demand(rate=12.0), duration_s=900.0
        )
        sizes[decode_help] = serving
    assert sizes[1.0].prefill < sizes[0.0].prefill
    assert sizes[1.0].decode == sizes[0.0].decode

"""A load that changes: pools grow in time for what comes, and shrink only when it stays away."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.planner.plan import Pool, PoolSizes, WorkerPhase
from cluster.planner.slo_planner import SloPlanner
from common.demand import Demand
from tests.cluster.planner.support import (
    INTERVAL_S,
    ONE_EACH,
    SETTINGS,
    STARTUP_S,
    FakePools,
    make_demand,
    make_worker,
    run,
    settle,
)

# Up.


@pytest.mark.parametrize("rate", [6.0, 15.0])
def test_step_up_is_served_two_plans_and_one_start_later(rate: float) -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(ONE_EACH)
    settle(planner, pools, 2.0)
    run(planner, pools, lambda _now_s: make_demand(rate=rate), duration_s=2 * INTERVAL_S)
    asked = planner.plan(pools.observe(make_demand(rate=rate))).sizes
    pools.advance(STARTUP_S)
    assert pools.serving.prefill > 1
    assert pools.serving.prefill >= min(asked.prefill, 3)


def test_growth_in_one_plan_is_bounded() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(PoolSizes(prefill=4, decode=4))
    history = run(planner, pools, lambda _now_s: make_demand(rate=100.0), duration_s=60.0)
    sizes = [4, *(plan.sizes.prefill for _time_s, _serving, plan in history)]
    assert max(after - before for before, after in pairwise(sizes)) <= 20
    assert sizes[2] == 6


def test_burst_of_three_seconds_changes_nothing() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(ONE_EACH)
    sizes = settle(planner, pools, 4.0)
    start_s = pools.now_s

    def demand_at(now_s: float) -> Demand:
        """Every hundred seconds, 3 s of five times the load."""
        is_burst = round((now_s - start_s) / INTERVAL_S) % 10 == 5
        if not is_burst:
            return make_demand(rate=4.0)
        return replace(make_demand(rate=4.0 + 16.0 * 3 / INTERVAL_S), burstiness=6.0)

    history = run(planner, pools, demand_at, duration_s=1000.0)
    assert {plan.sizes for _time_s, _serving, plan in history} == {sizes}


def test_ramp_is_met_before_it_arrives() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(PoolSizes(prefill=3, decode=2))
    run(planner, pools, lambda _now_s: make_demand(rate=5.0), duration_s=300.0)
    start_s = pools.now_s
    history = run(planner, pools, lambda now_s: make_demand(rate=5.0 + (now_s - start_s) / 60.0), duration_s=600.0)
    for time_s, serving, _plan in history:
        # 0.25 s of computing each: never more than the workers that serve have.
        assert (5.0 + (time_s - start_s) / 60.0) * 0.25 < serving.prefill


def test_line_that_cannot_be_worked_off_is_met_at_once() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(ONE_EACH)
    sizes = settle(planner, pools, 2.0)
    pools.advance(INTERVAL_S)
    plan = planner.plan(pools.observe(make_demand(rate=2.0, num_queued=200)))
    assert plan.sizes.prefill > sizes.prefill
    assert "200 wait" in plan.reason


# Down.


def test_end_of_the_load_brings_the_pools_to_their_smallest_one_by_one() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(ONE_EACH)
    settle(planner, pools, 40.0)
    history = run(planner, pools, lambda _now_s: make_demand(rate=0.0), duration_s=2500.0)
    sizes = [plan.sizes for _time_s, _serving, plan in history]
    assert sizes[-1] == ONE_EACH
    assert all(0 <= before.prefill - after.prefill <= 1 for before, after in pairwise(sizes))


@pytest.mark.parametrize(("startup_s", "least_s"), [(10.0, 60.0), (200.0, 200.0)])
def test_pool_shrinks_only_after_the_time_that_a_mistake_would_cost(startup_s: float, least_s: float) -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(PoolSizes(prefill=6, decode=2), startup_s=startup_s)
    run(planner, pools, lambda _now_s: make_demand(rate=15.0), duration_s=600.0)
    dropped_s, before = pools.now_s, pools.serving.prefill
    history = run(planner, pools, lambda _now_s: make_demand(rate=4.0), duration_s=600.0)
    shrunk_s = next(time_s for time_s, _serving, plan in history if plan.sizes.prefill < before)
    assert shrunk_s - dropped_s >= least_s


def test_pool_does_not_shrink_while_a_worker_of_it_starts_or_drains() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(PoolSizes(prefill=8, decode=1))
    for _ in range(40):
        pools.advance(INTERVAL_S)
        observed = pools.observe(make_demand(rate=3.0))
        draining = make_worker(Pool.PREFILL, 99, WorkerPhase.DRAINING)
        plan = planner.plan(replace(observed, workers=(*observed.workers, draining)))
        assert plan.sizes.prefill == 8


def test_need_that_comes_and_goes_faster_than_the_stable_time_keeps_the_workers() -> None:
    planner, pools = SloPlanner(SETTINGS), FakePools(PoolSizes(prefill=6, decode=1))

    def demand_at(now_s: float) -> Demand:
        return make_demand(rate=14.0 if int(now_s / 40) % 2 else 4.0)

    run(planner, pools, demand_at, duration_s=400.0)
    history = run(planner, pools, demand_at, duration_s=800.0)
    assert len({plan.sizes.prefill for _time_s, _serving, plan in history}) == 1

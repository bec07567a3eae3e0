"""Findings from points whose truth is known."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.experiment.analysis import Findings, Limit, analyze, first_limit
from measure.experiment.answers import agreement, answers_of
from measure.experiment.curves import curves_of, dispersion_of
from measure.experiment.payoff import Verdict
from measure.experiment.points import MeanUnit, Point, Source
from tests.measure.experiment.builders import LOADS, NUM_REQUESTS, make_arm, make_point, served_up_to


def findings(*points: Sequence[Point], share: float = 0.99) -> Findings:
    (found,) = analyze([point for group in points for point in group], share=share)
    return found


def said(found: Findings) -> str:
    return "\n".join(" ".join(answer) for answer in answers_of(found))


def test_capacity_lies_between_the_last_served_load_and_the_first_failed_one() -> None:
    (arm,) = findings(served_up_to(3.0, make_arm(1, 1))).arms
    assert 3.0 < arm.reach.load < 3.1  # where a line from 100 % at 3 to 67 % at 4 passes 99 %
    assert arm.reach.high is not None
    assert 2.9 < arm.reach.low <= arm.reach.load <= arm.reach.high < 4.0
    assert arm.reach.per_unit == arm.reach.load / 2


@given(st.floats(0.5, 6.5), st.sampled_from([0.9, 0.95, 0.99]))
@settings(max_examples=40, deadline=None)
def test_capacity_interval_holds_the_capacity_wherever_it_is(capacity: float, share: float) -> None:
    (arm,) = findings(served_up_to(capacity, make_arm(1, 1)), share=share).arms
    above = [load for load in LOADS if load > capacity]
    below = [load for load in LOADS if load <= capacity]
    assert arm.reach.load == 0 if not below else arm.reach.load >= below[-1]
    assert math.isinf(arm.reach.load) if not above else arm.reach.load < above[0]
    assert (arm.reach.high is None) == (not above)
    assert arm.reach.low <= arm.reach.load


def test_split_that_serves_twice_as_much_pays_and_the_gain_is_in_its_interval() -> None:
    found = findings(served_up_to(4.0, make_arm(1, 1)), served_up_to(2.0, make_arm(0, 2)))
    (payoff,) = found.payoffs
    assert payoff.verdict is Verdict.MORE
    assert payoff.ratio is not None
    assert payoff.ratio.low <= 2.0 <= payoff.ratio.high + 0.05
    assert 1.9 < payoff.ratio.value < 2.1
    assert said(found).startswith("Does disaggregation pay? Yes, with 2 workers")


@pytest.mark.parametrize(
    ("split", "whole", "verdict", "words"),
    [
        (2.0, 4.0, Verdict.LESS, "Does disaggregation pay? No, with 2 workers it loses"),
        (3.0, 3.0, Verdict.UNCLEAR, "Does disaggregation pay? Cannot tell with 2 workers"),
        (9.0, 9.0, Verdict.UNCLEAR, "1P1D serves more than 6/s, the highest load (95 %: at least 6)"),
    ],
    ids=["loses", "alike", "both serve every load"],
)
def test_split_that_does_not_serve_more_is_told_so(split: float, whole: float, verdict: Verdict, words: str) -> None:
    found = findings(served_up_to(split, make_arm(1, 1)), served_up_to(whole, make_arm(0, 2)))
    (payoff,) = found.payoffs
    assert payoff.verdict is verdict
    assert (payoff.ratio is None) == (split == 9.0)
    if split == whole:
        assert all(each.verdict is Verdict.UNCLEAR for each in payoff.loads)
    assert words in said(found)


def test_split_beyond_every_load_pays_and_goodput_says_by_how_much_at_least() -> None:
    found = findings(served_up_to(9.0, make_arm(1, 1)), served_up_to(2.0, make_arm(0, 2)))
    (payoff,) = found.payoffs
    assert (payoff.ratio, payoff.verdict) == (None, Verdict.MORE)
    assert "At 6/s 1P1D answers 6/s well and 2 aggregated 4.02/s (difference 1.98, 95 %: 1." in said(found)


def test_line_is_between_the_loads_at_which_the_better_arm_becomes_the_worse_one() -> None:
    split = [make_point(make_arm(1, 1), load, slow=0.2 if load < 3 else 0.0) for load in LOADS]
    whole = [make_point(make_arm(0, 2), load, slow=0.0 if load < 3 else 0.2) for load in LOADS]
    found = findings(split, whole)
    ((before, after),) = found.payoffs[0].flips
    assert (before.load, before.verdict, after.load, after.verdict) == (2.0, Verdict.LESS, 3.0, Verdict.MORE)
    assert "2 aggregated is ahead at 2/s" in said(found)
    assert "the line is between these loads" in said(found)


def test_aggregated_arm_with_as_many_threads_is_a_fair_comparison() -> None:
    split, whole = make_arm(1, 1, threads="1"), make_arm(0, 1, threads="2")
    found = findings(served_up_to(2.0, split), served_up_to(4.0, whole))
    assert found.payoffs[0].whole.arm == whole
    assert (found.unit, [arm.reach.num_units for arm in found.arms]) == (MeanUnit.THREAD, [2, 2])
    unstated = findings(served_up_to(2.0, make_arm(1, 1)), served_up_to(4.0, whole))
    assert (unstated.unit, [arm.reach.num_units for arm in unstated.arms]) == (MeanUnit.ARM, [1, 1])
    unequal = make_arm(0, 1, threads="4")
    assert not findings(served_up_to(2.0, split), served_up_to(4.0, unequal)).payoffs


@pytest.mark.parametrize(
    ("late", "slow", "kv_peak", "prefill_busy", "limit"),
    [
        (0.3, 0.0, 0.3, 0.95, Limit.PREFILL),
        (0.3, 0.0, 1.0, 0.95, Limit.PREFILL),
        (0.3, 0.0, 1.0, 0.4, Limit.MEMORY),
        (0.3, 0.0, 0.3, None, Limit.PREFILL),
        (0.1, 0.3, 0.3, 0.95, Limit.DECODE),
        (0.005, 0.0, 1.0, 0.95, Limit.NOTHING),
    ],
)
def test_limit_is_what_the_misses_and_the_pools_say(
    late: float, slow: float, kv_peak: float, prefill_busy: float | None, limit: Limit
) -> None:
    point = replace(make_point(make_arm(1, 1), 2.0, late=late, slow=slow), kv_peak=kv_peak, prefill_busy=prefill_busy)
    (curve,) = curves_of([point])
    assert first_limit(curve, share=0.99).limit is limit


@pytest.mark.parametrize(
    ("with_prefill", "with_decode", "pool", "words"),
    [
        (4.0, 2.0, "prefill", "Beside 1P1D, a prefill worker: 2P1D serves"),
        (3.0, 3.0, "", "Beside 1P1D, one cannot tell"),
    ],
)
def test_next_worker_is_of_the_pool_whose_neighbour_serves_more(
    with_prefill: float, with_decode: float, pool: str, words: str
) -> None:
    found = findings(
        served_up_to(2.0, make_arm(1, 1)),
        served_up_to(with_prefill, make_arm(2, 1)),
        served_up_to(with_decode, make_arm(1, 2)),
    )
    arm = found.of("1P1D")
    assert arm is not None and arm.next_worker is not None
    assert (arm.next_worker.pool, arm.next_worker.is_measured) == (pool, True)
    assert words in said(found)


@pytest.mark.parametrize(("by", "pool"), [("late", "prefill"), ("slow", "decode")])
def test_next_worker_without_neighbours_is_of_the_pool_that_gave_way(by: str, pool: str) -> None:
    (arm,) = findings(served_up_to(2.0, make_arm(1, 1), by=by)).arms
    assert arm.next_worker is not None
    assert (arm.next_worker.pool, arm.next_worker.is_measured) == (pool, False)


def test_balance_is_where_both_pools_carry_the_same() -> None:
    found = findings(served_up_to(2.0, make_arm(1, 3)), served_up_to(4.0, make_arm(3, 1), by="slow"))
    assert found.balance is not None  # 2/s for each prefill worker, 4/s for each decode worker
    assert found.balance.prefill_share == pytest.approx(2 / 3, abs=0.01)
    assert found.balance.split(12) == (8, 4)
    assert found.balance.split(2) == (1, 1)


def test_best_ratio_is_the_split_that_serves_most_of_as_many_workers() -> None:
    found = findings(
        *(served_up_to(capacity, make_arm(num, 4 - num)) for num, capacity in ((1, 2.0), (2, 4.0), (3, 3.0)))
    )
    (ranking,) = found.rankings
    assert [arm.arm.name for arm in ranking.arms] == ["2P2D", "3P1D", "1P3D"]
    assert ranking.verdict is Verdict.MORE
    assert "Of 4 workers, 2P2D: 2P2D serves" in said(found)


def test_knee_is_where_a_twentieth_of_the_load_is_lost() -> None:
    points = [make_point(make_arm(1, 1), load, late=max(0.0, load - 3) / 10) for load in LOADS]
    (arm,) = findings(points).arms
    assert arm.knee == pytest.approx(3.5)


def test_runs_that_differ_more_than_chance_widen_every_interval() -> None:
    arm = make_arm(1, 1)
    alike = [make_point(arm, load, late=late, repeat=n) for load in LOADS for n, late in ((0, 0.05), (1, 0.05))]
    apart = [make_point(arm, load, late=late, repeat=n) for load in LOADS for n, late in ((0, 0.01), (1, 0.09))]
    assert dispersion_of([alike]) == 1.0
    expected = 2 * (0.04 * NUM_REQUESTS) ** 2 / (NUM_REQUESTS * 0.05 * 0.95)
    assert dispersion_of([apart]) == pytest.approx(expected)
    widths = [
        each.good_share.high - each.good_share.low
        for points in (alike, apart)
        for each in curves_of(points)[0].readings[:1]
    ]
    assert widths[1] > 4 * widths[0]


def test_runs_that_differ_make_a_difference_unclear_that_would_be_clear_otherwise() -> None:
    def arms(spread: float) -> Findings:
        return findings(
            [make_point(make_arm(1, 1), 1.0, late=0.10 + d, repeat=n) for n, d in ((0, -spread), (1, spread))],
            [make_point(make_arm(0, 2), 1.0, late=0.14 + d, repeat=n) for n, d in ((0, -spread), (1, spread))],
        )

    assert arms(0.0).payoffs[0].loads[0].verdict is Verdict.MORE
    assert arms(0.1).payoffs[0].loads[0].verdict is Verdict.UNCLEAR


def test_analysis_is_the_same_each_time() -> None:
    points = [served_up_to(3.0, make_arm(1, 1)), served_up_to(2.0, make_arm(0, 2))]
    assert said(findings(*points)) == said(findings(*points))


def test_real_and_simulated_points_have_findings_of_their_own_and_are_compared() -> None:
    simulated = served_up_to(3.0, make_arm(1, 1))
    real = [replace(point, source=Source.REAL, duration_s=point.duration_s * 1.25) for point in simulated]
    found = analyze([*simulated, *real])
    assert [each.source for each in found] == [Source.REAL, Source.SIMULATED]
    ((_, answer),) = agreement(found)
    assert answer.startswith("At 6 loads that were measured and simulated, its goodput is off by 25 %")
    assert not list(agreement(found[:1]))


def test_growth_tells_what_a_worker_of_the_largest_cluster_serves() -> None:
    found = findings(
        *(served_up_to(2.0 * size, make_arm(size, size), [1.0, *(2.0 * s for s in (1, 2, 4, 8))]) for size in (1, 2, 4))
    )
    assert "Does it grow? 4P4D serves" in said(found)

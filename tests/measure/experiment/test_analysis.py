"""Findings from points whose truth is known."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.experiment.analysis import Findings, Limit, Verdict, analyze
from measure.experiment.curves import curves_of
from measure.experiment.points import MeanUnit, Point, Source
from measure.experiment.report import summary_text
from tests.measure.experiment.builders import LOADS, NUM_REQUESTS, make_arm, make_point, served_up_to


def findings(*points: Sequence[Point], share: float = 0.99) -> Findings:
    (found,) = analyze([point for group in points for point in group], share=share)
    return found


@given(st.floats(0.5, 6.5), st.sampled_from([0.9, 0.95, 0.99]))
@settings(max_examples=40, deadline=None)
def test_capacity_interval_holds_the_capacity_wherever_it_is(capacity: float, share: float) -> None:
    (arm,) = findings(served_up_to(capacity, make_arm(1, 1)), share=share).arms
    above = [load for load in LOADS if load > capacity]
    below = [load for load in LOADS if load <= capacity]
    assert arm.capacity.load == 0 if not below else arm.capacity.load >= below[-1]
    assert math.isinf(arm.capacity.load) if not above else arm.capacity.load < above[0]
    assert (arm.capacity.high is None) == (not above)
    assert arm.capacity.low <= arm.capacity.load


@pytest.mark.parametrize(
    ("split", "whole", "verdict", "words"),
    [
        (4.0, 2.0, Verdict.MORE, "1P1D serves most for each worker: 4.03/s (95 %: "),
        (4.0, 2.0, Verdict.MORE, "2 aggregated serves 2.03/s (95 %: 2.02 to 2.98): the split's gain is +99 % (95 %: "),
        (2.0, 4.0, Verdict.LESS, "disaggregation loses. First to give way in 2 aggregated: workers; at 5/s "),
        (
            3.0,
            3.0,
            Verdict.UNCLEAR,
            " in all, with 99 % good requests; not surely more than 2 aggregated. 2 aggregated serves 3.03/s",
        ),
        (
            9.0,
            2.0,
            Verdict.MORE,
            "more than 6/s, the highest load (95 %: at least 6) in all, with 99 % good requests. 2 agg",
        ),
        (9.0, 9.0, Verdict.UNCLEAR, "one cannot tell whether disaggregation pays."),
        (0.5, 0.5, Verdict.UNCLEAR, "No arm served any of its loads with 99 % good requests."),
    ],
)
def test_paragraph_says_whether_a_split_pays_and_by_how_much(
    split: float, whole: float, verdict: Verdict, words: str
) -> None:
    found = findings(served_up_to(split, make_arm(1, 1)), served_up_to(whole, make_arm(0, 2)))
    gain = found.gain_of(found.arms[0])
    assert gain is not None and gain.verdict is verdict
    assert (gain.ratio is None) == (not {split, whole} <= set(LOADS))
    if gain.ratio is not None:
        assert gain.ratio.low <= split / whole <= gain.ratio.high + 0.05
    assert words in summary_text(found)


def test_aggregated_arm_with_as_many_threads_is_a_fair_comparison() -> None:
    split, whole = make_arm(1, 1, threads="1"), make_arm(0, 1, threads="2")
    found = findings(served_up_to(2.0, split), served_up_to(4.0, whole))
    rival = found.rival_of(found.best_splits[0])
    assert rival is not None and rival.arm == whole
    assert (found.unit, [arm.num_units for arm in found.arms]) == (MeanUnit.THREAD, [2, 2])
    unstated = findings(served_up_to(2.0, make_arm(1, 1)), served_up_to(4.0, whole))
    assert (unstated.unit, [arm.num_units for arm in unstated.arms]) == (MeanUnit.ARM, [1, 1])
    unequal = findings(served_up_to(2.0, split), served_up_to(4.0, make_arm(0, 1, threads="4")))
    assert unequal.rival_of(unequal.best_splits[0]) is None


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
    assert findings([point]).arms[0].limit.limit is limit


def test_best_ratio_is_the_split_that_serves_most_of_as_many_workers() -> None:
    found = findings(
        *(served_up_to(capacity, make_arm(num, 4 - num)) for num, capacity in ((1, 2.0), (2, 4.0), (3, 3.0))),
        served_up_to(1.0, make_arm(1, 1)),
    )
    assert [arm.arm.name for arm in found.best_splits] == ["1P1D", "2P2D"]
    assert found.best.arm.name == "2P2D"


def test_runs_that_differ_more_than_chance_widen_every_interval() -> None:
    arm = make_arm(1, 1)
    alike, apart = (
        curves_of(
            [make_point(arm, load, late=0.05 + d, repeat=n) for load in LOADS for n, d in ((0, -spread), (1, spread))]
        )[0]
        for spread in (0.0, 0.04)
    )
    assert alike.dispersion == 1.0
    assert apart.dispersion == pytest.approx(2 * (0.04 * NUM_REQUESTS) ** 2 / (NUM_REQUESTS * 0.05 * 0.95))
    widths = [curve.readings[0].good_share.high - curve.readings[0].good_share.low for curve in (alike, apart)]
    assert widths[1] > 4 * widths[0]


def test_only_wanted_kinds_count_and_loads_without_them_are_left_out() -> None:
    points = served_up_to(3.0, make_arm(1, 1))
    chats = replace(points[-1].kinds["chats"], num_good=NUM_REQUESTS)
    points[-1] = replace(points[-1], kinds=points[-1].kinds | {"chats": chats})
    points[0] = replace(points[0], kinds={"all": points[0].overall})
    (curve,) = curves_of(points, ("chats",))
    assert [reading.load for reading in curve.readings] == [2, 3, 4, 5, 6]
    assert curve.readings[-1].good_share.value == 1.0
    assert curve.readings[-1].goodput.value < 5


def test_real_and_simulated_points_have_findings_of_their_own() -> None:
    simulated = served_up_to(3.0, make_arm(1, 1))
    real = [replace(point, source=Source.REAL, duration_s=point.duration_s * 1.25) for point in simulated]
    found = analyze([*simulated, *real])
    assert [each.source for each in found] == [Source.REAL, Source.SIMULATED]
    assert found == analyze([*simulated, *real])

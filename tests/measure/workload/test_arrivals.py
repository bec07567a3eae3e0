import bisect
import itertools
import math
import statistics
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.workload.arrivals import RateProfile, arrival_times

RAMP = RateProfile(((0, 2), (30, 20), (50, 0), (60, 0), (80, 10)))
STEPS = RateProfile.steps([(0, 5), (10, 0), (20, 30), (30, 5)])
POISSON, EVEN = 1.0, math.inf
rates = st.floats(0, 50) | st.just(0.0)


@st.composite
def profiles(draw: st.DrawFn) -> RateProfile:
    lengths = draw(st.lists(st.floats(0.1, 100), max_size=5))
    seconds = [0.0, *itertools.accumulate(lengths)]
    points = [(second, draw(rates)) for second in seconds]
    points[-1] = (points[-1][0], draw(st.floats(0.1, 50)))
    return draw(st.sampled_from([RateProfile, RateProfile.steps]))(tuple(points))


def until(end_s: float, times: Iterator[float]) -> list[float]:
    return list(itertools.takewhile(lambda time_s: time_s <= end_s, times))


@given(profiles(), st.floats(0, 1000))
def test_when_is_the_inverse_of_expected(profile: RateProfile, expected: float) -> None:
    when_s = profile.when(expected)
    assert profile.expected(when_s) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(profiles(), st.floats(0, 500), st.floats(0, 500))
def test_expected_arrivals_only_grow(profile: RateProfile, one: float, two: float) -> None:
    assert profile.expected(min(one, two)) <= profile.expected(max(one, two))


@given(profiles(), st.sampled_from([0.2, POISSON, 5.0, EVEN]), st.integers(0, 2**32))
def test_arrivals_come_in_order_and_again_with_the_same_seed(profile: RateProfile, shape: float, seed: int) -> None:
    times = list(itertools.islice(arrival_times(profile, shape, Random(seed)), 200))
    assert times == sorted(times)
    assert times[0] >= 0
    assert times == list(itertools.islice(arrival_times(profile, shape, Random(seed)), 200))


@pytest.mark.parametrize(
    ("profile", "end_s", "area"),
    [(RAMP, 30, 330), (RAMP, 60, 530), (RAMP, 90, 730), (STEPS, 25, 200), (STEPS, 40, 400)],
)
def test_area_below_the_rate_is_the_count_expected(profile: RateProfile, end_s: float, area: float) -> None:
    assert profile.expected(end_s) == pytest.approx(area)


@pytest.mark.parametrize("profile", [RateProfile(((0, 5),)), RAMP, STEPS])
@pytest.mark.parametrize("shape", [0.3, POISSON, 4.0, EVEN])
def test_as_many_arrive_as_the_rate_integrates_to(profile: RateProfile, shape: float) -> None:
    runs = [until(90, arrival_times(profile, shape, Random(seed))) for seed in range(150)]
    for end_s in (7, 25, 90):
        counts = [bisect.bisect_right(times, end_s) for times in runs]
        error = statistics.stdev(counts) / math.sqrt(len(counts))
        assert statistics.fmean(counts) == pytest.approx(profile.expected(end_s), abs=4 * error + 1e-9)


def test_nothing_arrives_while_the_rate_is_zero() -> None:
    times = until(40, arrival_times(STEPS, POISSON, Random(3)))
    assert not [time_s for time_s in times if 10 < time_s < 20]


def test_arrivals_end_when_the_last_rate_is_zero() -> None:
    profile = RateProfile.steps([(0, 10), (5, 0)])
    times = list(arrival_times(profile, POISSON, Random(3)))
    assert 20 < len(times) < 90
    assert times[-1] <= 5


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 1.0, 4.0])
def test_intervals_have_the_variance_of_their_burstiness(burstiness: float) -> None:
    times = list(itertools.islice(arrival_times(RateProfile(((0, 3),)), burstiness, Random(5)), 40_000))
    intervals = [after - before for before, after in itertools.pairwise(times)]
    mean = statistics.fmean(intervals)
    assert mean == pytest.approx(1 / 3, rel=0.05)
    assert statistics.variance(intervals) / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_even_arrivals_have_equal_intervals_and_begin_within_the_first() -> None:
    times = list(itertools.islice(arrival_times(RateProfile(((0, 4),)), EVEN, Random(5)), 100))
    assert 0 <= times[0] < 0.25
    assert [after - before for before, after in itertools.pairwise(times)] == pytest.approx([0.25] * 99)

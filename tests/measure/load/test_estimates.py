import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.load.estimates import PERCENTILES, MeasuredDistribution, Resampler

TIMES = st.lists(st.floats(min_value=0, max_value=1e3, allow_nan=False), min_size=1, max_size=80)


def distribution(values: list[float]) -> MeasuredDistribution:
    found = Resampler(len(values)).distribution(np.array(values), np.arange(len(values)))
    assert found is not None
    return found


def test_distribution_of_one_to_a_hundred_is_exact() -> None:
    found = distribution([float(value) for value in range(100, 0, -1)])
    assert [found.at(p).value for p in PERCENTILES] == pytest.approx([50.5, 90.1, 95.05, 99.01])
    assert (found.mean.value, found.max, found.num_requests, found.num_values) == (50.5, 100, 100, 100)


@given(TIMES)
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    found = distribution(values)
    assert [found.at(p).value for p in PERCENTILES] == np.quantile(values, PERCENTILES).tolist()


@given(TIMES)
def test_intervals_hold_their_values_and_lie_among_the_data(values: list[float]) -> None:
    found = distribution(values)
    for estimate in (found.mean, *(percentile.estimate for percentile in found.percentiles)):
        assert estimate.low <= estimate.value <= estimate.high
        assert min(values) - 1e-9 <= estimate.low
        assert estimate.high <= max(values) + 1e-9


def test_distribution_of_nothing_is_none() -> None:
    assert Resampler(3).distribution(np.empty(0), np.empty(0, dtype=np.int64)) is None


def test_interval_of_fewer_than_five_requests_goes_from_least_to_greatest() -> None:
    found = distribution([1.0, 4.0, 2.0])
    assert (found.at(0.5).estimate.low, found.at(0.5).estimate.high) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("num_requests", "plain"), [(999, {0.5, 0.9, 0.95}), (1000, {0.5, 0.9, 0.95, 0.99}), (19, set())]
)
def test_percentile_is_sufficient_when_ten_requests_lie_beyond_it(num_requests: int, plain: set[float]) -> None:
    found = distribution([float(value) for value in range(num_requests)])
    assert {percentile.p for percentile in found.percentiles if percentile.is_sufficient} == plain
    assert found.at(0.99).num_needed == 1000


def test_percentile_of_gaps_that_come_from_few_requests_is_insufficient() -> None:
    num_requests, num_gaps = 40, 100
    gaps = np.full((num_requests, num_gaps), 0.01)
    gaps[3, :] = 1.0  # one stalled answer holds all the gaps beyond p99
    owners = np.repeat(np.arange(num_requests), num_gaps)
    found = Resampler(num_requests).distribution(gaps.ravel(), owners)
    assert found is not None
    assert (found.num_requests, found.num_values) == (40, 4000)
    assert not found.at(0.99).is_sufficient
    assert found.at(0.99).num_needed == 400


def test_interval_of_gaps_is_wider_when_requests_differ() -> None:
    rng = np.random.default_rng(0)
    num_requests, num_gaps = 200, 50
    owners = np.repeat(np.arange(num_requests), num_gaps)
    between = np.repeat(rng.exponential(size=num_requests), num_gaps)
    within = rng.permutation(between)
    widths = []
    for values in (between, within):
        found = Resampler(num_requests).distribution(values, owners)
        assert found is not None
        widths.append(found.mean.high - found.mean.low)
    assert widths[0] > 4 * widths[1]  # sqrt(50) = 7 in theory


def test_intervals_of_independent_values_have_their_nominal_coverage() -> None:
    num_trials = 150
    hits = dict.fromkeys((0.5, 0.9, 0.95), 0)
    for trial in range(num_trials):
        found = distribution(np.random.default_rng(trial).exponential(size=300).tolist())
        for p in hits:
            hits[p] += found.at(p).estimate.low <= -math.log(1 - p) <= found.at(p).estimate.high
    for p, count in hits.items():
        assert 0.88 <= count / num_trials <= 0.99, p


def test_interval_of_correlated_values_is_wider_than_of_shuffled_ones() -> None:
    rng = np.random.default_rng(1)
    steps = rng.normal(size=2000)
    values = np.zeros(2000)
    for i in range(1, 2000):
        values[i] = 0.8 * values[i - 1] + steps[i]
    widths = [(e := distribution(v.tolist()).mean).high - e.low for v in (values, rng.permutation(values))]
    assert widths[0] > 1.5 * widths[1]


def test_share_has_wilsons_interval_at_none_and_all() -> None:
    z = 1.959964
    for good, low, high in ((0, 0.0, z**2 / (50 + z**2)), (50, 50 / (50 + z**2), 1.0)):
        share = Resampler(50).share(np.arange(50) < good)
        assert (share.value, share.low, share.high) == pytest.approx((good / 50, low, high), abs=1e-6)


def test_interval_of_a_share_has_its_nominal_coverage() -> None:
    num_trials, hits = 400, 0
    for trial in range(num_trials):
        share = Resampler(300).share(np.random.default_rng(trial).random(300) < 0.95)
        hits += share.low <= 0.95 <= share.high
    assert 0.91 <= hits / num_trials <= 0.99


def test_interval_of_a_share_is_wider_when_failures_come_together() -> None:
    together = np.ones(1000, dtype=bool)
    together[400:500] = False
    apart = np.ones(1000, dtype=bool)
    apart[::10] = False
    bunched, even = Resampler(1000).share(together), Resampler(1000).share(apart)
    assert bunched.value == even.value == 0.9
    assert bunched.high - bunched.low > 2 * (even.high - even.low)


def test_percentiles_of_very_many_values_are_exact_and_their_intervals_tight() -> None:
    values = np.random.default_rng(0).permutation(np.arange(50_000, dtype=np.float64))
    found = distribution(values.tolist())
    assert found.at(0.99).value == pytest.approx(49_499.01)
    assert found.at(0.99).estimate.low == pytest.approx(49_420, abs=60)
    assert found.at(0.99).estimate.high == pytest.approx(49_580, abs=60)

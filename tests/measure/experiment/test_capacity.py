"""The capacity search on curves that are known."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from measure.experiment.capacity import ArmCapacity, ProbedLoad, crossing, find_capacity
from measure.experiment.points import Point, Source
from measure.experiment.spec import CapacitySpec, ExperimentError
from measure.load.estimates import wilson
from tests.measure.experiment.builders import make_arm, make_point

NUM_REQUESTS = 1000


def search(
    share_at: Callable[[float, int], float],
    *,
    start: float = 1.0,
    spec: CapacitySpec | None = None,
    num_requests: int = NUM_REQUESTS,
) -> ArmCapacity:
    """Search on a curve of good shares by load and repeat."""

    def probe(load: float, repeat: int) -> Point:
        late = 1 - share_at(load, repeat)
        return make_point(load=load, late=late, repeat=repeat, num_requests=num_requests)

    return find_capacity(make_arm(), Source.REAL, spec or CapacitySpec(), start=start, probe=probe)


def step(at: float) -> Callable[[float, int], float]:
    """Return a curve on which everything is good up to a load, and half of it beyond."""
    return lambda load, _: 1.0 if load <= at else 0.5


@given(at=st.floats(0.05, 5000), start=st.floats(0.01, 10_000), precision=st.floats(0.005, 0.5))
def test_search_without_noise_ends_within_its_precision_below_the_true_capacity(
    at: float, start: float, precision: float
) -> None:
    found = search(step(at), start=start, spec=CapacitySpec(precision=precision, max_loads=100))
    assert found.load <= at < found.load * (1 + precision) * 1.001  # loads have four digits
    assert all(0.01 <= probe.load <= 10_000 for probe in found.probes)
    assert len(found.probes) <= 40


def test_search_doubles_then_bisects_and_measures_clear_loads_once() -> None:
    found = search(step(5.0), spec=CapacitySpec(precision=0.2, repeats=3))
    assert [probe.load for probe in found.probes] == [1, 2, 4, 4.757, 5.657, 8]
    assert [probe.num_runs for probe in found.probes] == [1] * 6
    assert found.load == 4.757
    assert found.high is not None
    assert (found.low, round(found.high, 1)) == (4.757, 5.6)  # the gap that is left


def test_search_from_an_overload_halves() -> None:
    found = search(step(1.0), start=8.0, spec=CapacitySpec(precision=0.9))
    assert [probe.load for probe in found.probes] == [1, 1.414, 2, 4, 8]


def test_search_repeats_doubtful_loads_and_twice_as_often_where_it_ends() -> None:
    found = search(lambda load, _: 0.99 if load <= 2 else 0.5, spec=CapacitySpec(precision=0.9, repeats=3))
    assert {probe.load: probe.num_runs for probe in found.probes} == {1: 3, 2: 6, 2.828: 1, 4: 1}
    assert [probe.is_clear for probe in found.probes] == [False, False, True, True]
    assert found.load == 2


def test_search_that_serves_the_highest_load_has_no_upper_end() -> None:
    found = search(lambda *_: 1.0, spec=CapacitySpec(high=6))
    assert (found.load, found.high) == (6, None)
    assert [probe.load for probe in found.probes] == [1, 2, 4, 6]


def test_search_that_serves_nothing_says_zero() -> None:
    found = search(lambda *_: 0.0, spec=CapacitySpec(low=0.3))
    assert (found.load, found.low, found.high, found.goodput_per_s) == (0, 0, 0, 0)
    assert [probe.load for probe in found.probes] == [0.3, 0.5, 1]


def test_search_with_a_limit_of_loads_returns_what_is_known_then() -> None:
    found = search(step(100.0), spec=CapacitySpec(max_loads=3))
    assert (found.load, found.high) == (4, None)


def test_goodput_at_capacity_is_that_of_the_served_load() -> None:
    found = search(step(5.0), spec=CapacitySpec(precision=0.2))
    assert found.goodput_per_s == pytest.approx(4.757)
    assert found.goodput_per_worker == pytest.approx(4.757 / 2)


def test_load_that_failed_by_chance_is_measured_again_and_does_not_hide_those_above() -> None:
    def share_at(load: float, repeat: int) -> float:
        if load > 7:
            return 0.5
        return 0.985 if (load, repeat) == (2, 0) else 1.0

    found = search(share_at, spec=CapacitySpec(repeats=1, precision=0.2))
    assert found.load == pytest.approx(7, rel=0.2)
    assert {probe.load: probe.num_runs for probe in found.probes}[2.0] == 2


def test_shares_that_rise_with_the_load_are_pooled() -> None:
    runs = {1.0: [1.0], 2.0: [0.991, 0.988], 2.828: [0.988, 0.996], 4.0: [0.5]}  # in the end 0.9895 at 2, 0.992 above
    found = search(lambda load, repeat: runs[load][repeat], spec=CapacitySpec(repeats=1, precision=0.45))
    assert found.load == 2.828


@given(
    runs=st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=8),
    share=st.sampled_from([0.5, 0.9, 0.99]),
)
def test_capacity_is_where_the_nearest_falling_shares_cross(runs: list[tuple[int, float]], share: float) -> None:
    probes = [
        ProbedLoad(load=load, num_requests=count, num_good=round(count * good), num_runs=1, is_clear=True)
        for load, (count, good) in enumerate(runs, start=1)
    ]
    weights = [probe.num_requests for probe in probes]
    nearest = isotonic_regression([probe.good_share for probe in probes], weights=weights, increasing=False).x.round(12)
    num_served = int(np.count_nonzero(nearest >= share))
    if num_served == 0:
        expected = 0.0
    elif num_served == len(probes):
        expected = math.inf
    else:
        above, below = nearest[num_served - 1 : num_served + 1]
        expected = num_served + (above - share) / (above - below)
    assert crossing(probes, share) == pytest.approx(expected, abs=1e-6)


def test_search_counts_only_the_kinds_it_is_asked_about() -> None:
    found = search(step(5.0), spec=CapacitySpec(kinds=("chats",), high=1))
    assert found.probes[0].num_requests == NUM_REQUESTS
    with pytest.raises(ExperimentError, match="no stream sends 'agents'; there are all, chats, documents"):
        search(step(5.0), spec=CapacitySpec(kinds=("agents",)))


def test_search_without_requests_says_so() -> None:
    with pytest.raises(ExperimentError, match="no request was sent at 1/s"):
        search(step(5.0), num_requests=0)


@given(seed=st.integers(0, 1000), num_requests=st.integers(1, 400), share=st.sampled_from([0.9, 0.99]))
def test_search_under_noise_ends_and_its_shares_never_rise(seed: int, num_requests: int, share: float) -> None:
    rng = np.random.default_rng(seed)

    spec = CapacitySpec(share=share, low=0.1, high=100, max_loads=1000)
    found = search(
        lambda load, _: rng.binomial(num_requests, _logistic(load)) / num_requests, spec=spec, num_requests=num_requests
    )
    loads = [each.load for each in found.probes]
    assert loads == sorted(set(loads))
    assert loads[0] >= 0.1
    assert loads[-1] <= 100
    assert found.load == 0 or found.load in loads
    assert found.high is None or found.low <= found.high
    if found.load not in (0, 100):
        above = min((load for load in loads if load > found.load), default=None)
        assert above is not None
        assert above <= found.load * 1.0501


def test_interval_under_noise_holds_the_truth_as_often_as_it_says() -> None:
    truth = 10 * (1 / 0.99 - 1) ** (1 / 8)  # where `_logistic` is 0.99
    num_held = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        found = search(partial(_noisy_share, rng), num_requests=500)
        num_held += found.low <= truth and (found.high is None or truth <= found.high)
    assert num_held >= 85  # of 100; 90 to 99 where the search itself chose what to measure


@pytest.mark.parametrize(
    ("num_good", "num_requests", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (990, 1000, 0.9817, 0.9946)],
)
def test_wilson_interval_is_that_of_the_tables(num_good: int, num_requests: int, low: float, high: float) -> None:
    found = wilson(num_good / num_requests, num_requests)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def _noisy_share(rng: np.random.Generator, load: float, _repeat: int) -> float:
    return float(rng.binomial(500, _logistic(load)) / 500)


def _logistic(load: float) -> float:
    return 1 / (1 + math.exp(8 * math.log(load / 10)))

"""The capacity search on curves that are known."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from measure.experiment.capacity import capacity_of, first_load, searched_loads
from measure.experiment.curves import ArmCurve, curves_of
from measure.experiment.points import Point
from measure.experiment.spec import CapacitySpec, ExperimentError
from tests.measure.experiment.builders import make_point

NUM_REQUESTS = 1000


def searched(
    share_at: Callable[[float, int], float],
    *,
    start: float = 1.0,
    spec: CapacitySpec | None = None,
    num_requests: int = NUM_REQUESTS,
) -> ArmCurve:
    """Search on a curve of good shares by load and repeat."""
    spec = spec or CapacitySpec(repeats=1)
    points: dict[float, list[Point]] = {}
    for load in searched_loads(start, spec, lambda load: points[load]):
        points[load] = [
            make_point(load=load, late=1 - share_at(load, repeat), repeat=repeat, num_requests=num_requests)
            for repeat in range(spec.repeats)
        ]
    (curve,) = curves_of(itertools.chain(*points.values()))
    return curve


def loads_of(curve: ArmCurve) -> list[float]:
    return [reading.load for reading in curve.readings]


def step(at: float) -> Callable[[float, int], float]:
    """Return a curve on which everything is good up to a load, and half of it beyond."""
    return lambda load, _: 1.0 if load <= at else 0.5


@given(at=st.floats(0.05, 5000), start=st.floats(0.01, 10_000), precision=st.floats(0.005, 0.5))
def test_search_without_noise_ends_within_its_precision_below_the_true_capacity(
    at: float, start: float, precision: float
) -> None:
    spec = CapacitySpec(precision=precision, max_loads=100, repeats=1)
    curve = searched(step(at), start=first_load(1, spec, default=start), spec=spec)
    below, above = ([load for load in loads_of(curve) if (load <= at) is is_below] for is_below in (True, False))
    assert above[0] <= below[-1] * (1 + precision) * 1.001  # loads have four digits
    assert all(0.01 <= load <= 10_000 for load in loads_of(curve))
    assert len(loads_of(curve)) <= 40


@pytest.mark.parametrize(
    ("start", "spec", "loads"),
    [
        (1.0, {"precision": 0.2}, [1, 2, 4, 4.757, 5.657, 8]),
        (16.0, {"precision": 0.9}, [4, 5.657, 8, 16]),
        (1.0, {"high": 4}, [1, 2, 4]),
        (20.0, {"low": 10}, [10, 20]),
        (1.0, {"max_loads": 3}, [1, 2, 4]),
    ],
    ids=["doubles, then bisects", "halves from an overload", "highest", "lowest", "most loads"],
)
def test_search_measures_these_loads(start: float, spec: dict[str, float], loads: list[float]) -> None:
    assert loads_of(searched(step(5.0), start=start, spec=CapacitySpec.model_validate({"repeats": 1, **spec}))) == loads


@pytest.mark.parametrize(
    ("spec", "load"),
    [({}, 3.0), ({"start": 0.5}, 0.5), ({"start_per_worker": 2}, 8.0), ({"start_per_worker": 2, "high": 5}, 5.0)],
)
def test_search_begins_at_the_stated_load_or_the_first_of_the_file(spec: dict[str, float], load: float) -> None:
    assert first_load(4, CapacitySpec.model_validate(spec), default=3.0) == load


def test_search_measures_every_load_as_often_as_asked() -> None:
    curve = searched(step(5.0), spec=CapacitySpec(max_loads=4, repeats=3))
    assert [len(reading.points) for reading in curve.readings] == [3] * 4


@given(
    runs=st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=8),
    share=st.sampled_from([0.5, 0.9, 0.99]),
)
@settings(max_examples=30)
def test_capacity_is_where_the_nearest_falling_shares_cross(runs: list[tuple[int, float]], share: float) -> None:
    points = [
        make_point(load=float(load), late=1 - good, num_requests=count) for load, (count, good) in enumerate(runs, 1)
    ]
    (curve,) = curves_of(points)
    shares = [reading.good_share.value for reading in curve.readings]
    nearest = isotonic_regression(shares, weights=[count for count, _ in runs], increasing=False).x.round(12)
    num_served = int(np.count_nonzero(nearest >= share))
    if num_served == 0:
        expected = 0.0
    elif num_served == len(points):
        expected = math.inf
    else:
        above, below = nearest[num_served - 1 : num_served + 1]
        expected = num_served + (above - share) / (above - below)
    assert capacity_of(curve, share=share).load == pytest.approx(expected, abs=1e-6)


def test_search_without_requests_says_so() -> None:
    with pytest.raises(ExperimentError, match="no request that counts was sent at 1/s"):
        searched(step(5.0), num_requests=0)


def test_interval_under_noise_holds_the_truth_as_often_as_it_says() -> None:
    truth = 10 * (1 / 0.99 - 1) ** (1 / 8)  # where `_logistic` is 0.99
    num_held = 0
    for seed in range(100):
        noise = partial(_noisy_share, np.random.default_rng(seed))
        found = capacity_of(searched(noise, num_requests=500, spec=CapacitySpec(max_loads=100)), share=0.99)
        num_held += found.low <= truth and (found.high is None or truth <= found.high)
    assert num_held >= 85  # of 100; 90 to 99 where the search itself chose what to measure


def _noisy_share(rng: np.random.Generator, load: float, _repeat: int) -> float:
    return float(rng.binomial(500, _logistic(load)) / 500)


def _logistic(load: float) -> float:
    return 1 / (1 + math.exp(8 * math.log(load / 10)))

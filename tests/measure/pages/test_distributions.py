"""Curves of distributions; thinned data gives the same plot as all data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.pages.axes import Axis, Scale, Unit
from measure.pages.distributions import (
    EXACT_TAIL_POINTS,
    MAX_CURVE_POINTS,
    ValueSample,
    ecdf,
    ecdf_figure,
    rolling,
    scatter_indices,
)
from measure.pages.figures import Frame, LimitLine

FRAME = Frame(
    x=Axis(title="TTFT", unit=Unit.SECONDS, scale=Scale.LOG), x_limits=(LimitLine(value=2.0, text="objective"),)
)


def test_curve_rises_by_one_value_at_a_time() -> None:
    figure = ecdf_figure([ValueSample(name="a", values=[3.0, 1.0, 2.0, 4.0])], FRAME)
    (curve,) = figure.data
    np.testing.assert_allclose(curve.x, [1, 2, 3, 4])
    np.testing.assert_allclose(curve.y, [0.25, 0.5, 0.75, 1.0])


def test_buttons_show_all_of_a_distribution_or_its_tail() -> None:
    figure = ecdf_figure([ValueSample(name="a", values=[1.0, 2.0])], FRAME)
    everything, tail = (button.args[0]["yaxis.range"] for button in figure.layout.updatemenus[0].buttons)
    assert everything[0] == 0 and tail[0] == 0.9
    assert list(figure.layout.yaxis.range) == everything


def test_zeros_stay_on_a_logarithmic_axis() -> None:
    (curve,) = ecdf_figure([ValueSample(name="a", values=[0.0, 1.0])], FRAME).data
    assert min(curve.x) > 0


def test_nothing_at_all_is_an_empty_figure() -> None:
    figure = ecdf_figure([ValueSample(name="a", values=[])], FRAME)
    assert figure.data == ()


@given(values=st.lists(st.floats(0, 1e6), max_size=50))
def test_small_distribution_is_exact(values: list[float]) -> None:
    x, shares = ecdf(np.array(values))
    assert x.tolist() == sorted(values)
    assert shares.tolist() == [(index + 1) / len(values) for index in range(len(values))]


@pytest.mark.parametrize("size", [900, 901, 1000, 100_000])
def test_large_distribution_keeps_tail_and_ranks(size: int) -> None:
    values = np.random.default_rng(1).permutation(size).astype(float)
    x, shares = ecdf(values)
    assert x.size <= MAX_CURVE_POINTS
    np.testing.assert_array_equal(x[-EXACT_TAIL_POINTS:], np.arange(size - EXACT_TAIL_POINTS, size))
    np.testing.assert_allclose(shares, (x + 1) / size)
    assert x[0] == 0
    assert np.diff(shares).max() < 0.01


def test_thinned_cloud_keeps_its_highest_points() -> None:
    y = np.random.default_rng(2).random(20_000)
    kept = scatter_indices(y, 1000)
    assert kept.size <= 1000
    assert set(np.argsort(y)[-100:]) <= set(kept)
    assert (np.diff(kept) > 0).all()
    assert scatter_indices(y[:1000], 1000).tolist() == list(range(1000))


@given(
    events=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=60),
    num_bins=st.integers(1, 20),
)
def test_rolling_percentiles_are_of_the_values_in_each_interval(
    events: list[tuple[float, float]], num_bins: int
) -> None:
    at_s, values = np.array(events).T
    result = rolling(at_s, values, percentiles=(0.0, 100.0), num_bins=num_bins)
    width = (at_s.max() + 1e-9 - at_s.min()) / num_bins
    assert result.values[0.0].min() == values.min()
    assert result.values[100.0].max() == values.max()
    assert (np.diff(result.at_s) > width / 2).all()
    for middle, low, high in zip(result.at_s, result.values[0.0], result.values[100.0], strict=True):
        near = values[np.abs(at_s - middle) <= width / 2 + 1e-6]
        assert low in near
        assert high in near


def test_rolling_of_nothing_is_empty() -> None:
    result = rolling(np.array([]), np.array([]), percentiles=(50.0,))
    assert result.at_s.size == result.values[50.0].size == 0

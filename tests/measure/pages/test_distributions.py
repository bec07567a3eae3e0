"""Curves of distributions, and the view of their tail."""

import numpy as np
import pytest

from measure.pages.axes import Axis, Scale, Unit
from measure.pages.distributions import Sample, View, ecdf_figure
from measure.pages.figures import Frame, LimitLine

FRAME = Frame(
    x=Axis(title="TTFT", unit=Unit.SECONDS, scale=Scale.LOG), x_limits=(LimitLine(value=2.0, text="objective"),)
)


def test_curve_rises_by_one_value_at_a_time() -> None:
    figure = ecdf_figure([Sample(name="a", values=[3.0, 1.0, 2.0, 4.0])], FRAME)
    (curve,) = figure.data
    np.testing.assert_allclose(curve.x, [1, 2, 3, 4])
    np.testing.assert_allclose(curve.y, [0.25, 0.5, 0.75, 1.0])


def test_tail_view_has_nines_at_equal_distances() -> None:
    figure = ecdf_figure([Sample(name="a", values=np.arange(1.0, 10_001.0))], FRAME, View.TAIL)
    axis = figure.layout.yaxis
    assert axis.ticktext == ("0%", "50%", "90%", "99%", "99.9%", "99.99%")
    np.testing.assert_allclose(axis.tickvals[2:], [1, 2, 3, 4], atol=1e-9)
    (curve,) = figure.data
    heights = dict(zip(np.asarray(curve.x).tolist(), np.asarray(curve.y).tolist(), strict=True))
    assert heights[9900.0] == pytest.approx(2.0, abs=1e-6)
    assert heights[9990.0] == pytest.approx(3.0, abs=1e-5)
    assert np.isfinite(heights[10000.0])
    assert max(heights.values()) <= axis.range[1]


def test_buttons_give_both_views_of_every_curve() -> None:
    figure = ecdf_figure([Sample(name="a", values=[1.0, 2.0]), Sample(name="b", values=[5.0])], FRAME)
    even, tail = figure.layout.updatemenus[0].buttons
    assert even.args[0]["y"] == [[0.5, 1.0], [1.0]]
    assert tail.args[0]["y"] == pytest.approx([pytest.approx([0.30103, 0.60206]), pytest.approx([0.30103])])
    assert figure.layout.updatemenus[0].active == 0


def test_zeros_stay_on_a_logarithmic_axis() -> None:
    (curve,) = ecdf_figure([Sample(name="a", values=[0.0, 1.0])], FRAME).data
    assert min(curve.x) > 0


def test_nothing_at_all_is_an_empty_figure() -> None:
    figure = ecdf_figure([Sample(name="a", values=[])], FRAME)
    assert figure.data == ()
    assert figure.layout.updatemenus == ()

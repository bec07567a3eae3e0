"""Formats of numbers and ticks."""

import numpy as np
import pytest

from measure.pages import wording
from measure.pages.axes import Axis, Scale, Unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.5e-4, "350 µs"),
        (0.00099949, "999 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (1.2345, "1.23 s"),
        (240, "240 s"),
        (12345, "12,345 s"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


def test_large_numbers_have_prefixes() -> None:
    assert wording.scaled(1.5e9, "B") == "1.5 GB"
    assert wording.scaled(32_000) == "32 k"
    assert wording.scaled(12) == "12"
    assert wording.percent(0.99166) == "99.2 %"
    assert wording.count(1, "request") == "1 request"
    assert wording.count(1200, "request") == "1,200 requests"


def test_ticks_of_few_decades_have_steps_between() -> None:
    axis = Axis(unit=Unit.SECONDS, scale=Scale.LOG)
    assert axis.ticks(np.array([0.0, 0.02, 0.4]))["ticktext"][:5] == ["10 ms", "20 ms", "50 ms", "100 ms", "200 ms"]
    assert "25 ms" in axis.ticks(np.array([0.021, 0.034]))["ticktext"]
    assert axis.ticks(np.array([0.001, 9000.0]))["ticktext"][:4] == ["1 ms", "10 ms", "100 ms", "1 s"]
    assert axis.ticks(np.array([0.0])) == {}
    assert Axis(unit=Unit.SECONDS).ticks(np.array([1.0])) == {}


@pytest.mark.parametrize(
    ("low", "high", "places"),
    [(671, 727, [660, 680, 700, 720, 740]), (0.0193, 0.0197, [0.0193, 0.0194, 0.0195, 0.0196, 0.0197]), (5, 5, [5])],
)
def test_values_close_together_have_even_ticks(low: float, high: float, places: list[float]) -> None:
    axis = Axis(unit=Unit.TOKENS, scale=Scale.LOG)
    assert axis.ticks(np.array([low, high]))["tickvals"] == pytest.approx(places)

"""Formats of numbers and ticks."""

import pytest

from measure.pages import wording


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

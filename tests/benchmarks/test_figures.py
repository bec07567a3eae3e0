"""Figures of rounds: medians, ranges, and ratios of the same round."""

import pytest

from benchmarks.figures import Figures, in_turn, spread


def make_figures(**rounds: tuple[float, ...]) -> Figures:
    figures = Figures()
    for arm, values in rounds.items():
        for value in values:
            figures.add("part", "case", arm, tokens_per_s=value)
    return figures


def test_ratios_are_those_of_each_round() -> None:
    figures = make_figures(a=(10.0, 40.0, 30.0), b=(5.0, 10.0, 10.0))
    ours, theirs = figures.all.values()

    assert figures.ratios(ours, "b") == [2.0, 4.0, 3.0]
    assert figures.ratios(theirs, "b") == []


def test_table_has_median_range_and_ratio() -> None:
    (table,) = make_figures(a=(10.0, 40.0, 30.0), b=(5.0, 10.0, 10.0)).tables(base="b")

    assert [str(column.header) for column in table.columns] == ["case", "arm", "tokens per s", "tokens per s / b"]
    assert [list(column.cells) for column in table.columns][2:] == [["30 (10–40)", "10 (5–10)"], ["3 (2–4)", ""]]


@pytest.mark.parametrize(
    ("values", "text"), [([0.5], "0.5"), ([1.0, 3.0], "2 (1–3)"), ([381.26, 367.0, 389.4], "381.3 (367–389)")]
)
def test_spread_of_one_value_has_no_range(values: list[float], text: str) -> None:
    assert spread(values) == text


def test_in_turn_goes_backwards_in_every_other_round() -> None:
    assert [in_turn(("a", "b"), number) for number in range(2)] == [("a", "b"), ("b", "a")]

"""A comparison as a table for a terminal."""

from collections.abc import Iterator, Sequence
from string import ascii_uppercase

from rich.console import Group, RenderableType
from rich.text import Text

from measure.load.comparison import Comparison, Row, Unit
from measure.load.estimates import Estimate
from measure.load.tables import UNKNOWN, UNSURE, between, plain_table
from measure.pages.wording import count, duration, number, percent

_BETTER, _WORSE, _CAUTION = "bold green", "bold red", "bold yellow"


def comparison_view(comparison: Comparison, names: Sequence[str]) -> RenderableType:
    """Return runs side by side, each but the first with its change; coloured changes exceed chance."""
    letters = [ascii_uppercase[place % len(ascii_uppercase)] for place in range(len(names))]
    table = plain_table("", "", num_left=2)
    for place, letter in enumerate(letters):
        table.add_column(letter, justify="right", no_wrap=True)
        if place:
            table.add_column(f"{letter} against {letters[0]}", justify="right", no_wrap=True)
    previous = ""
    for row in comparison.rows:
        if previous and row.kind != previous:
            table.add_section()
        table.add_row(row.kind if row.kind != previous else "", row.name, *_comparison_cells(row))
        previous = row.kind
    return Group(*_legend(comparison, letters, names), "", table, "", *_notes(comparison, letters))


def _legend(comparison: Comparison, letters: Sequence[str], names: Sequence[str]) -> Iterator[Text]:
    for letter, name, summary in zip(letters, names, comparison.summaries, strict=True):
        facts = (
            f" {name} · {summary.info.system} · {summary.info.target} · {count(summary.window.num_counted, 'request')}"
        )
        yield Text.assemble((letter, "bold"), facts)


def _notes(comparison: Comparison, letters: Sequence[str]) -> Iterator[Text]:
    """Yield how to read the figures, and the warnings of every run."""
    paired = [letter for letter, is_paired in zip(letters[1:], comparison.is_paired[1:], strict=True) if is_paired]
    yield Text(
        "×1.2 [1.1 – 1.3]: the ratio and its 95 % interval (pt: difference in points). Coloured: equal runs would"
        " differ this much in fewer than 1 of 20 cases; 1 of 20 rows is coloured by chance. Intervals do not cover"
        " differences between runs at different times.",
        style="dim",
    )
    how = f"Compared request by request: {', '.join(paired)}." if paired else "The runs sent different requests."
    yield Text(how, style="dim")
    for letter, summary in zip(letters, comparison.summaries, strict=True):
        for warning in summary.warnings:
            yield Text(f"! {letter}: {warning}", style=_CAUTION)


def _comparison_cells(row: Row) -> Iterator[Text]:
    write = {Unit.SECONDS: duration, Unit.PER_S: number, Unit.SHARE: percent}[row.unit]
    for place, cell in enumerate(row.cells):
        if cell is None:
            yield Text(UNKNOWN)
        else:
            yield Text(f"{'' if cell.is_sufficient else UNSURE}{write(cell.value.value)}")
        if place:
            yield _change(row, place, cell.change if cell is not None else None)


def _change(row: Row, place: int, change: Estimate | None) -> Text:
    if change is None:
        return Text(UNKNOWN)
    if row.unit is Unit.SHARE:
        text = f"{100 * change.value:+.1f} [{100 * change.low:+.1f} – {100 * change.high:+.1f}] pt"
        is_more = change.value > 0
    else:
        text = f"×{number(change.value)} [{between(change, number)}]"
        is_more = change.value > 1
    if not row.is_significant(place):
        return Text(text)
    return Text(text, style=_BETTER if is_more == row.more_is_better else _WORSE)

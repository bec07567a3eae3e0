"""A comparison as a table for a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from loadtest.comparison import Comparison, Row, Unit
from loadtest.estimates import Estimate
from loadtest.tables import NOT_TOLD, UNSURE, between, plain_table
from reporting.wording import duration, number, percent

_BETTER, _WORSE, _CAUTION = "bold green", "bold red", "bold yellow"


def comparison_view(comparison: Comparison, names: Sequence[str]) -> RenderableType:
    """Return runs side by side, each but the first with its change; bold changes are more than chance."""
    table = plain_table("", "", num_left=2)
    for place, name in enumerate(names):
        table.add_column(name, justify="right", no_wrap=True)
        if place:
            table.add_column("against the first", justify="right", no_wrap=True)
    previous = ""
    for row in comparison.rows:
        if previous and row.kind != previous:
            table.add_section()
        table.add_row(row.kind if row.kind != previous else "", row.name, *_comparison_cells(row))
        previous = row.kind
    paired = [name for name, is_paired in zip(names[1:], comparison.is_paired[1:], strict=True) if is_paired]
    notes = [
        "×1.2 [1.1 – 1.3]: the ratio and its 95 % interval; coloured when equal runs would differ so much in fewer than"
        " 1 of 20 cases. Of 20 rows one is coloured by chance; differences between runs at other times are not in it.",
        f"compared request by request: {', '.join(paired)}" if paired else "the runs asked different requests",
    ]
    warnings = [
        Text(f"! {name}: {warning}", style=_CAUTION)
        for name, summary in zip(names, comparison.summaries, strict=True)
        for warning in summary.warnings
    ]
    return Group(table, "", *(Text(note, style="dim") for note in notes), *warnings)


def _comparison_cells(row: Row) -> Iterator[Text]:
    write = {Unit.SECONDS: duration, Unit.PER_S: number, Unit.SHARE: percent}[row.unit]
    for place, cell in enumerate(row.cells):
        if cell is None:
            yield Text(NOT_TOLD)
        else:
            yield Text(f"{'' if cell.is_sufficient else UNSURE}{write(cell.value.value)}")
        if place:
            yield _change(row, place, cell.change if cell is not None else None)


def _change(row: Row, place: int, change: Estimate | None) -> Text:
    if change is None:
        return Text(NOT_TOLD)
    if row.unit is Unit.SHARE:
        text = f"{100 * change.value:+.1f} [{100 * change.low:+.1f} – {100 * change.high:+.1f}] points"
        is_more = change.value > 0
    else:
        text = f"×{number(change.value)} [{between(change, number)}]"
        is_more = change.value > 1
    if not row.is_significant(place):
        return Text(text)
    return Text(text, style=_BETTER if is_more == row.more_is_better else _WORSE)

"""A comparison as a table for a terminal, and as a page: a table and plots in one file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from measure.figures import Percentiles
from measure.load.tables import plain_table
from measure.pages.page import Listing, Page, PageSection, Panel, Width, write_page
from measure.simulate import plots
from measure.simulate.bound import Bound
from measure.simulate.comparison import REQUESTS_FILE, CellResult, PolicyComparison
from measure.simulate.results import ForecastCheck, SimulationSummary
from measure.simulate.store import read_requests, write_json

_COLUMNS: dict[str, Callable[[CellResult], str]] = {
    "policy": lambda cell: cell.cell.policy,
    "goodput/s": lambda cell: f"{cell.summary.goodput_per_s:.2f}",
    "good %": lambda cell: f"{100 * cell.summary.figures.good_share:.1f}",
    "refused %": lambda cell: (
        f"{100 * cell.summary.figures.num_not_complete / max(1, cell.summary.figures.num_requests):.1f}"
    ),
    "TTFT p50/p90/p99 s": lambda cell: _times(cell.summary.figures.ttft, "{0.p50:.2f}/{0.p90:.2f}/{0.p99:.2f}"),
    "TPOT p50/p99 ms": lambda cell: _times(cell.summary.figures.tpot, "{0.p50:.0f}/{0.p99:.0f}", factor=1000),
    "E2E p50/p99 s": lambda cell: _times(cell.summary.figures.e2e, "{0.p50:.1f}/{0.p99:.1f}"),
    "hit %": lambda cell: f"{100 * cell.summary.token_hit:.1f}",
    "pulled %": lambda cell: f"{100 * cell.summary.pulled_share:.1f}",
    "hot spot": lambda cell: f"{cell.summary.hot_spot:.2f}",
    "moved GB": lambda cell: f"{cell.summary.transfer_bytes / 1e9:.0f}",
    "busy P/D %": lambda cell: (
        f"{'-' if cell.summary.prefill_busy is None else f'{100 * cell.summary.prefill_busy:.0f}'}"
        f"/{100 * cell.summary.decode_busy:.0f}"
    ),
    "choice µs": lambda cell: f"{cell.clock.choice_p50_us:.0f}",
}
_TABLE_WIDTH = 220


Bounds = Mapping[float, Bound]
"""Bounds by speed; none where they were not asked for."""
_NO_BOUNDS: Bounds = {}


def comparison_table(results: Sequence[CellResult], bounds: Bounds = _NO_BOUNDS) -> Table:
    """Return one row per cell, in sections by speed; the best goodput of each section is bold."""
    columns = _COLUMNS | (_bound_columns(bounds) if bounds else {})
    table = plain_table("speed", *columns, num_left=2)
    for speed, group in groupby(results, key=lambda result: result.cell.speed):
        cells = list(group)
        best = max(cell.summary.goodput_per_s for cell in cells)
        for index, cell in enumerate(cells):
            is_best = cell.summary.goodput_per_s == best and len(cells) > 1
            row = [f"{speed:g}×" if index == 0 else "", *(write(cell) for write in columns.values())]
            table.add_row(*row, style="bold" if is_best else None, end_section=index == len(cells) - 1)
    return table


_FORECASTS: dict[str, Callable[[SimulationSummary], ForecastCheck | None]] = {
    "TTFT, entering the line": lambda summary: summary.line_ttft_forecast,
    "TTFT, at the choice": lambda summary: summary.ttft_forecast,
    "TPOT": lambda summary: summary.tpot_forecast,
}
FORECASTS_NOTE = (
    "off: median relative error of the routers' forecasts; held: plotted within their intervals, which should be 80 %"
)


def forecast_table(results: Sequence[CellResult]) -> Table | None:
    """Return a row for each cell whose routers forecast; None without any."""
    rows = [
        (
            f"{result.cell.speed:g}×",
            result.cell.policy,
            *(_check_text(find(result.summary)) for find in _FORECASTS.values()),
        )
        for result in results
        if any(find(result.summary) for find in _FORECASTS.values())
    ]
    if not rows:
        return None
    table = plain_table("speed", "policy", *(f"{name}: off, held %" for name in _FORECASTS), num_left=2)
    for row in rows:
        table.add_row(*row)
    return table


def _check_text(check: ForecastCheck | None) -> str:
    if check is None:
        return "-"
    held = "-" if check.held_share is None else f"{100 * check.held_share:.0f}"
    return f"{100 * check.median_error:.0f}, {held}"


def _times(latency: Percentiles | None, form: str, *, factor: float = 1) -> str:
    if latency is None:
        return "-"
    return form.format(Percentiles(p50=factor * latency.p50, p90=factor * latency.p90, p99=factor * latency.p99))


def _bound_columns(bounds: Bounds) -> dict[str, Callable[[CellResult], str]]:
    return {
        "bound %": lambda cell: f"{100 * bounds[cell.cell.speed].good_share:.1f}",
        "of bound %": lambda cell: f"{100 * bounds[cell.cell.speed].ratio(cell.summary.figures.num_good):.1f}",
    }


def write_report(comparison: PolicyComparison, results: Sequence[CellResult], bounds: Bounds = _NO_BOUNDS) -> Path:
    """Write `table.txt` and `report.html` to the comparison's folder, `bounds.json` too if there are bounds.

    Returns the page. Raises OSError.
    """
    table = _text_of(comparison_table(results, bounds))
    if bounds:
        write_json(comparison.out / "bounds.json", {f"{speed:g}": asdict(bound) for speed, bound in bounds.items()})
    (comparison.out / "table.txt").write_text(table, encoding="utf-8")
    overview = PageSection(
        title="Overview",
        panels=(
            Panel(title="What was run", content=Listing(text=_settings_text(comparison))),
            Panel(title="Results", content=Listing(text=table)),
            *_forecast_panels(results),
        ),
    )
    path = comparison.out / "report.html"
    title = f"Placement policies on {comparison.settings.trace.stem}"
    write_page(path, Page(title=title, sections=(overview, *_sections(comparison, results))))
    return path


def _sections(comparison: PolicyComparison, results: Sequence[CellResult]) -> Iterator[PageSection]:
    plotted = [
        plots.plotted_cell(result, read_requests(comparison.folder(result.cell) / REQUESTS_FILE)) for result in results
    ]
    yield PageSection(
        title="Goodput and load",
        panels=(
            Panel(
                title="Good requests of all",
                look_for="The further a policy stays near 100 %, the more load it holds.",
                content=plots.good_share_by_speed(plotted),
                width=Width.HALF,
            ),
            Panel(
                title="Goodput",
                look_for="A curve that bends down serves fewer requests the more arrive.",
                content=plots.goodput_by_speed(plotted),
                width=Width.HALF,
            ),
        ),
    )
    yield PageSection(
        title="Hits and balance",
        panels=(
            Panel(
                title="Token hit against hot spot",
                look_for="Up and to the left is best: many hits, and no worker computes more than its share.",
                content=plots.hits_and_balance(plotted),
                note="A point for each policy and speed; larger at higher speeds.",
            ),
        ),
    )
    for speed, group in groupby(plotted, key=lambda cell: cell.speed):
        yield _speed_section(comparison, speed, list(group))


def _speed_section(comparison: PolicyComparison, speed: float, cells: Sequence[plots.PlottedCell]) -> PageSection:
    slo = comparison.settings.slo
    return PageSection(
        title=f"Speed {speed:g}",
        panels=(
            Panel(
                title=f"TTFT at speed {speed:g}",
                look_for="Where a curve crosses the objective is its share of answers that began in time.",
                content=plots.ttft_curves(cells, slo.ttft_s),
                note="Answered requests only: a policy that refuses many looks fast here.",
                width=Width.HALF,
            ),
            Panel(
                title=f"Mean gap between tokens at speed {speed:g}",
                look_for="Where a curve crosses the objective is its share of answers that were fast enough.",
                content=plots.tpot_curves(cells, slo.tpot_s),
                width=Width.HALF,
            ),
            Panel(
                title=f"Load of each worker at speed {speed:g}",
                look_for="Lines on top of each other show an even load; one that stands out is a hot spot.",
                content=plots.load_over_time(cells),
                note="Prompt tokens to compute that each worker got in each sixtieth of the trace.",
            ),
        ),
    )


def _settings_text(comparison: PolicyComparison) -> str:
    settings = comparison.settings
    hardware, slo = settings.hardware, settings.slo
    workers = f"{settings.num_prefill}P{settings.num_decode}D" if settings.num_prefill else f"{settings.num_decode}"
    on = hardware.timing_file.name if hardware.timing_file else f"{hardware.model} on {hardware.device}"
    return "\n".join(
        [
            f"trace      {settings.trace.name}, lengths / {settings.shrink}, first {settings.num_requests or 'all'}"
            f"{'' if settings.stages is None else f', arrivals in stages: {settings.stages.name}'}",
            f"workers    {workers}, {on}, {settings.num_blocks} pages of {settings.block_size} tokens each,"
            f" steps of at most {settings.max_step_tokens} tokens",
            f"routers    {settings.num_routers}; load and KV events every {settings.report_interval_s:g} s,"
            f" {settings.event_lag_s:g} s late; refused at once: {settings.shed}",
            f"SLO        TTFT {slo.ttft_s:g} s per {slo.ttft_tokens} prompt tokens, at least one of these;"
            f" mean gap {slo.tpot_s * 1000:g} ms; refusals and misses are not good",
            f"seed       {settings.seed}",
        ]
    )


def _forecast_panels(results: Sequence[CellResult]) -> Iterator[Panel]:
    table = forecast_table(results)
    if table is not None:
        look_for = "Held far below 80: do not trust the intervals."
        yield Panel(title="Forecasts", look_for=look_for, content=Listing(text=_text_of(table)), note=FORECASTS_NOTE)


def _text_of(table: Table) -> str:
    console = Console(width=_TABLE_WIDTH, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"

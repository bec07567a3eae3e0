"""Comparisons and traces as tables for a terminal."""

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from measure.simulate.replay import CellResult
from measure.workload.trace_stats import PlacementHits, Spread, TraceStats

_COLUMNS = (
    "policy",
    "goodput/s",
    "good %",
    "refused %",
    "TTFT p50/p90/p99 s",
    "ITL p50/p99 ms",
    "E2E p50/p99 s",
    "hit %",
    "pulled %",
    "hot spot",
    "moved GB",
    "busy P/D %",
    "choice µs",
)


def comparison_table(results: Sequence[CellResult]) -> Table:
    """Return one row per cell, in sections by speed; the best goodput of each section is bold."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("speed", justify="right", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for speed, group in groupby(results, key=lambda result: result.cell.speed):
        cells = list(group)
        best = max(cell.summary.goodput_per_s for cell in cells)
        for index, cell in enumerate(cells):
            is_best = cell.summary.goodput_per_s == best and len(cells) > 1
            first = f"{speed:g}×" if index == 0 else ""
            table.add_row(first, *_row(cell), style="bold" if is_best else None, end_section=index == len(cells) - 1)
    return table


def stats_table(stats: TraceStats) -> Table:
    """Return a trace's statistics, one per line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("requests", f"{stats.num_requests:,}"),
        ("duration", f"{stats.duration_s:,.1f} s"),
        ("rate", f"{stats.requests_per_s:.2f} requests/s, at most {stats.max_burst} in one second"),
        ("prompt tokens", _spread(stats.prompt_tokens)),
        ("output tokens", _spread(stats.output_tokens)),
        ("blocks", f"{stats.num_blocks:,}, {stats.num_unique_blocks:,} different"),
        ("infinite-cache hit", f"{stats.infinite_cache_hit:.2%} of all blocks"),
        ("more than one block hit", f"{stats.share_beyond_first:.1%} of the requests"),
    ):
        table.add_row(name, value)
    return table


def placement_line(name: str, hits: PlacementHits) -> tuple[str, str]:
    """Return a placement's name and its hits."""
    return name, f"{hits.block_hit:.2%} of all blocks, hot spot {hits.hot_spot:.2f}"


def _row(result: CellResult) -> list[str]:
    summary, figures = result.summary, result.summary.figures
    refused = figures.num_not_complete / figures.num_requests if figures.num_requests else 0.0
    busy = "-" if summary.prefill_busy is None else f"{100 * summary.prefill_busy:.0f}"
    return [
        result.cell.policy,
        f"{summary.goodput_per_s:.2f}",
        f"{100 * figures.good_share:.1f}",
        f"{100 * refused:.1f}",
        "-" if figures.ttft is None else f"{figures.ttft.p50:.2f}/{figures.ttft.p90:.2f}/{figures.ttft.p99:.2f}",
        "-" if figures.tpot is None else f"{1000 * figures.tpot.p50:.0f}/{1000 * figures.tpot.p99:.0f}",
        "-" if figures.e2e is None else f"{figures.e2e.p50:.1f}/{figures.e2e.p99:.1f}",
        f"{100 * summary.token_hit:.1f}",
        f"{100 * summary.pulled_share:.1f}",
        f"{summary.hot_spot:.2f}",
        f"{summary.transfer_bytes / 1e9:.0f}",
        f"{busy}/{100 * summary.decode_busy:.0f}",
        f"{result.clock.choice_p50_us:.0f}",
    ]


def _spread(spread: Spread) -> str:
    return (
        f"mean {spread.mean:,.0f}, p50 {spread.p50:,.0f}, p90 {spread.p90:,.0f},"
        f" p99 {spread.p99:,.0f}, max {spread.max:,.0f}"
    )

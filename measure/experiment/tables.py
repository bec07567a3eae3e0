"""Tables of an experiment: means of the runs for a terminal; findings on each arm, and every run, for its page."""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from operator import attrgetter
from urllib.parse import quote

from rich.table import Table as TerminalTable

from measure.experiment.analysis import ArmFinding, Findings
from measure.experiment.capacity import ArmCapacity
from measure.experiment.curves import curves_of
from measure.experiment.points import Cell, Point, Source
from measure.experiment.store import Store
from measure.figures import Percentiles
from measure.pages.page import Panel, Section, Table
from measure.pages.wording import duration, number, percent

_LEFT = ("arm", "")
_NONE = "–"


def points_table(points: Iterable[Point]) -> TerminalTable:
    """Return a row for each arm and load: means of the repeats, and medians of percentiles with their range."""
    curves = curves_of(points)
    has_simulated = any(curve.source is Source.SIMULATED for curve in curves)
    table = _table(
        "arm",
        "load /s",
        "runs",
        "good",
        "good /s",
        "per worker",
        "TTFT p50",
        "p99 s",
        "ITL p50",
        "p99 ms",
        "prefill busy",
        "decode busy",
    )
    for curve, reading in ((each, reading) for each in curves for reading in each.readings):
        is_marked = has_simulated and curve.source is Source.SIMULATED
        table.add_row(
            f"{curve.arm.name} (simulated)" if is_marked else curve.arm.name,
            f"{reading.load:g}",
            str(len(reading.points)),
            f"{reading.share_of(lambda figures: figures.num_good):.1%}" if reading.num_requests else _NONE,
            f"{reading.mean_of(lambda point: point.goodput_per_s):.2f}",
            f"{reading.mean_of(lambda point: point.goodput_per_worker):.2f}",
            *_latencies([point.overall.ttft for point in reading.points], "{:.2f}", 1),
            *_latencies([point.overall.itl for point in reading.points], "{:.0f}", 1000),
            _share(reading.mean_of(lambda point: point.prefill_busy)),
            _share(reading.mean_of(lambda point: point.decode_busy)),
        )
    return table


def capacity_table(capacities: Iterable[ArmCapacity]) -> TerminalTable:
    """Return a row for each capacity."""
    table = _table("arm", "", "serves /s", "95 %", "good /s", "per worker", "loads tried")
    for capacity in capacities:
        high = "?" if capacity.high is None else f"{capacity.high:.3g}"
        table.add_row(
            capacity.arm.name,
            capacity.source.value,
            f"{capacity.load:.3g}",
            f"{capacity.low:.3g} – {high}",
            f"{capacity.goodput_per_s:.2f}",
            f"{capacity.goodput_per_worker:.2f}",
            str(len(capacity.probes)),
        )
    return table


def _table(*columns: str) -> TerminalTable:
    table = TerminalTable(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right")
    return table


def _latencies(latencies: Sequence[Percentiles | None], form: str, factor: float) -> tuple[str, str]:
    known = [latency for latency in latencies if latency is not None]
    picks = attrgetter("p50"), attrgetter("p99")
    p50, p99 = (_range([factor * pick(latency) for latency in known], form) for pick in picks)
    return p50, p99


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return _NONE
    low, middle, high = (form.format(each) for each in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0%}"


def tables_section(findings: Sequence[Findings], store: Store) -> Section:
    """Return the tables; runs link to their own pages, if the store has them."""
    panels = [_arms_table(each) for each in findings]
    return Section(title="All numbers", panels=(*panels, _points_table(findings, store)))


def _arms_table(findings: Findings) -> Panel:
    rows = tuple(
        (
            arm.arm.name,
            _finite(arm.reach.load),
            f"{number(arm.reach.low)} to {'more' if arm.reach.high is None else number(arm.reach.high)}",
            _finite(arm.reach.per_unit),
            _NONE if arm.knee is None else f"{number(arm.knee)}/s",
            f"{number(arm.curve.peak.goodput.value)}/s at {number(arm.curve.peak.load)}/s",
            arm.limit.limit.value,
            _next(arm),
        )
        for arm in findings.arms
    )
    best = {payoff.split.arm.name for payoff in findings.payoffs}
    return Panel(
        title=f"Arms, {findings.source.value}",
        content=Table(
            columns=(
                "arm",
                "serves",
                "95 %",
                f"per {findings.unit}",
                "knee",
                "most goodput",
                "gives way first",
                "next worker",
            ),
            rows=rows,
            text_columns=frozenset(["gives way first", "next worker"]),
            strong_rows=frozenset(index for index, arm in enumerate(findings.arms) if arm.arm.name in best),
        ),
        note="Bold: the best split of its size.",
    )


def _next(arm: ArmFinding) -> str:
    following = arm.next_worker
    if following is None:
        return _NONE
    if not following.pool:
        return "cannot tell"
    return following.pool if following.is_measured else f"{following.pool}, probably"


def _finite(value: float) -> str:
    return f"{number(value)}/s" if 0 < value < math.inf else _NONE


def _points_table(findings: Sequence[Findings], store: Store) -> Panel:
    rows, links = [], []
    for each in findings:
        for arm in each.arms:
            for reading in arm.curve.readings:
                for point in reading.points:
                    rows.append(_point_row(point))
                    links.append(_link(point, store))
    return Panel(
        title="Runs",
        content=Table(
            columns=(
                "arm",
                "source",
                "load /s",
                "run",
                "requests",
                "good",
                "good /s",
                "late",
                "slow",
                "refused",
                "TTFT p50",
                "p99",
                "gap p50",
                "p99 ",
                "prefill busy",
                "decode busy",
                "KV peak",
                "cached",
            ),
            rows=tuple(rows),
            text_columns=frozenset(["source"]),
            links=tuple(links) if any(links) else (),
        ),
        note="Arms link to the pages of their runs, if there are any.",
    )


def _point_row(point: Point) -> tuple[str, ...]:
    overall = point.overall
    return (
        point.arm.name,
        point.source.value,
        f"{point.load:g}",
        str(point.repeat + 1),
        f"{overall.num_requests:,}",
        percent(overall.good_share),
        number(point.goodput_per_s),
        str(overall.num_ttft_misses),
        str(overall.num_itl_misses),
        str(overall.num_not_complete),
        *_times(overall.ttft),
        *_times(overall.itl),
        *(_NONE if share is None else percent(share, 0) for share in (point.prefill_busy, point.decode_busy)),
        _NONE if point.kv_peak is None else percent(point.kv_peak, 0),
        _NONE if point.token_hit is None else percent(point.token_hit, 0),
    )


def _times(latency: Percentiles | None) -> tuple[str, str]:
    return (_NONE, _NONE) if latency is None else (duration(latency.p50), duration(latency.p99))


def _link(point: Point, store: Store) -> str:
    """Return the link from the experiment's page to a run's own page; empty without one."""
    folder = store.folder(point.source, Cell(arm=point.arm.name, load=point.load, repeat=point.repeat))
    page = folder / "report.html"
    return quote(os.path.relpath(page, store.out)) if page.exists() else ""

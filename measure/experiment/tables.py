"""Tables of an experiment: means of the runs for a terminal; findings on each arm, and every run, for its page."""

import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from urllib.parse import quote

from rich.table import Table as TerminalTable

from measure.experiment.analysis import ArmFinding, Findings
from measure.experiment.capacity import ArmCapacity
from measure.experiment.curves import ArmCurve, Reading, curves_of
from measure.experiment.points import Cell, Point, Source
from measure.experiment.store import Store
from measure.figures import Percentiles
from measure.load.tables import UNKNOWN, filled_table, or_unknown, whole_percent
from measure.pages.page import PageSection, Panel, table_of
from measure.pages.wording import duration, number, percent, rate


def points_table(points: Iterable[Point]) -> TerminalTable:
    """Return a row for each arm and load: means of the repeats, and medians of percentiles with their range."""
    readings = [(curve, reading) for curve in curves_of(points) for reading in curve.readings]
    columns: dict[str, Callable[[tuple[ArmCurve, Reading]], str]] = {
        "arm": lambda row: row[0].arm.name + (" (simulated)" if row[0].source is Source.SIMULATED else ""),
        "load /s": lambda row: f"{row[1].load:g}",
        "runs": lambda row: str(len(row[1].points)),
        "good": lambda row: f"{row[1].good_share.value:.1%}" if row[1].num_requests else UNKNOWN,
        "good /s": lambda row: f"{row[1].mean_of(attrgetter('goodput_per_s')):.2f}",
        "per worker": lambda row: f"{row[1].mean_of(attrgetter('goodput_per_worker')):.2f}",
        "TTFT p50": lambda row: _range(row[1], "ttft.p50", "{:.2f}"),
        "p99 s": lambda row: _range(row[1], "ttft.p99", "{:.2f}"),
        "ITL p50": lambda row: _range(row[1], "itl.p50", "{:.0f}", factor=1000),
        "p99 ms": lambda row: _range(row[1], "itl.p99", "{:.0f}", factor=1000),
        "prefill busy": lambda row: or_unknown(row[1].mean_of(attrgetter("prefill_busy")), "{:.0%}".format),
        "decode busy": lambda row: or_unknown(row[1].mean_of(attrgetter("decode_busy")), "{:.0%}".format),
    }
    return filled_table(readings, columns)


def capacity_table(capacities: Iterable[ArmCapacity]) -> TerminalTable:
    """Return a row for each capacity."""
    columns: dict[str, Callable[[ArmCapacity], str]] = {
        "arm": lambda found: found.arm.name,
        "": lambda found: found.source.value,
        "serves /s": lambda found: f"{found.load:.3g}",
        "95 %": lambda found: f"{found.low:.3g} – {'?' if found.high is None else f'{found.high:.3g}'}",
        "good /s": lambda found: f"{found.goodput_per_s:.2f}",
        "per worker": lambda found: f"{found.goodput_per_worker:.2f}",
        "loads tried": lambda found: str(len(found.probes)),
    }
    return filled_table(capacities, columns, num_left=2)


def _range(reading: Reading, name: str, form: str, *, factor: float = 1) -> str:
    """Return the median of a latency over the runs, with the smallest and the largest where they differ."""
    latency, percentile = name.split(".")
    known = [found for point in reading.points if (found := getattr(point.overall, latency)) is not None]
    values = [factor * getattr(found, percentile) for found in known]
    if not values:
        return UNKNOWN
    low, middle, high = (form.format(each) for each in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def tables_section(findings: Sequence[Findings], store: Store) -> PageSection:
    """Return the tables; runs link to their own pages, if the store has them."""
    panels = [_arms_table(each) for each in findings]
    return PageSection(title="All numbers", panels=(*panels, _points_table(findings, store)))


def _arms_table(findings: Findings) -> Panel:
    columns: dict[str, Callable[[ArmFinding], str]] = {
        "arm": lambda arm: arm.arm.name,
        "serves": lambda arm: _finite(arm.reach.load),
        "95 %": lambda arm: (
            f"{number(arm.reach.low)} to {'more' if arm.reach.high is None else number(arm.reach.high)}"
        ),
        f"per {findings.unit}": lambda arm: _finite(arm.reach.per_unit),
        "knee": lambda arm: or_unknown(arm.knee, rate),
        "most goodput": lambda arm: f"{rate(arm.curve.peak.goodput.value)} at {rate(arm.curve.peak.load)}",
        "gives way first": lambda arm: arm.limit.limit.value,
        "next worker": _next,
    }
    best = {payoff.split.arm.name for payoff in findings.payoffs}
    return Panel(
        title=f"Arms, {findings.source.value}",
        content=table_of(
            findings.arms,
            columns,
            text_columns=frozenset(["gives way first", "next worker"]),
            strong_rows=frozenset(index for index, arm in enumerate(findings.arms) if arm.arm.name in best),
        ),
        note="Bold: the best split of its size.",
    )


def _next(arm: ArmFinding) -> str:
    following = arm.next_worker
    if following is None:
        return UNKNOWN
    if not following.pool:
        return "cannot tell"
    return following.pool if following.is_measured else f"{following.pool}, probably"


def _finite(value: float) -> str:
    return f"{number(value)}/s" if 0 < value < math.inf else UNKNOWN


def _points_table(findings: Sequence[Findings], store: Store) -> Panel:
    arms = [arm for each in findings for arm in each.arms]
    points = [point for arm in arms for reading in arm.curve.readings for point in reading.points]
    columns: dict[str, Callable[[Point], str]] = {
        "arm": lambda point: point.arm.name,
        "source": lambda point: point.source.value,
        "load /s": lambda point: f"{point.load:g}",
        "run": lambda point: str(point.repeat + 1),
        "requests": lambda point: f"{point.overall.num_requests:,}",
        "good": lambda point: percent(point.overall.good_share),
        "good /s": lambda point: number(point.goodput_per_s),
        "late": lambda point: str(point.overall.num_ttft_misses),
        "slow": lambda point: str(point.overall.num_tpot_misses),
        "refused": lambda point: str(point.overall.num_not_complete),
        "TTFT p50": lambda point: _time(point.overall.ttft, "p50"),
        "p99": lambda point: _time(point.overall.ttft, "p99"),
        "gap p50": lambda point: _time(point.overall.itl, "p50"),
        "p99 ": lambda point: _time(point.overall.itl, "p99"),
        "prefill busy": lambda point: or_unknown(point.prefill_busy, whole_percent),
        "decode busy": lambda point: or_unknown(point.decode_busy, whole_percent),
        "KV peak": lambda point: or_unknown(point.kv_peak, whole_percent),
        "cached": lambda point: or_unknown(point.token_hit, whole_percent),
    }
    links = tuple(_link(point, store) for point in points)
    return Panel(
        title="Runs",
        content=table_of(points, columns, text_columns=frozenset(["source"]), links=links if any(links) else ()),
        note="Arms link to the pages of their runs, if there are any.",
    )


def _time(latency: Percentiles | None, percentile: str) -> str:
    return UNKNOWN if latency is None else duration(getattr(latency, percentile))


def _link(point: Point, store: Store) -> str:
    """Return the link from the experiment's page to a run's own page; empty without one."""
    folder = store.folder(point.source, Cell(arm=point.arm.name, load=point.load, repeat=point.repeat))
    page = folder / "report.html"
    return quote(os.path.relpath(page, store.out)) if page.exists() else ""

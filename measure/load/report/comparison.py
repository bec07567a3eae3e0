"""The page of several load tests: plots laid over each other, and comparisons with the first."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from measure.figures import ALL
from measure.load.comparison import Row, RunComparison, change_text, compare, value_text
from measure.load.estimates import Estimate
from measure.load.records import Run
from measure.load.report.columns import Measure, RequestColumns, columns_of, open_requests, rolling_curves
from measure.load.report.handoff import phases_figure
from measure.load.summary import Summary
from measure.pages import axes
from measure.pages.axes import RUN_TIME, Axis, Scale
from measure.pages.distributions import ValueSample, ecdf_figure
from measure.pages.figures import Bars, Curve, Frame, bar_figure, line_figure
from measure.pages.page import Absent, Page, PageSection, Panel, Table, Width, write_page
from measure.pages.theme import DASHES, Phase, colors_of

MAX_KINDS = 3
"""Most kinds that plots separate."""
_WORDS = {"good": "share of good requests"}
_VERDICT = ("good", "goodput", "TTFT p99", "ITL p99", "TPOT p99")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arm:
    """A run with its name and colour in plots."""

    name: str
    color: str
    columns: RequestColumns
    summary: Summary


def write_comparison(runs: Sequence[tuple[Run, Summary]], path: Path) -> None:
    """Write the page of two or more runs, compared with the first of them. Raises OSError."""
    write_page(path, comparison_page(runs))


def comparison_page(runs: Sequence[tuple[Run, Summary]]) -> Page:
    """Return the page of two or more runs."""
    names = distinct_names([run for run, _ in runs])
    colors = colors_of(names)
    arms = [
        _Arm(name=name, color=colors[name], columns=columns_of(run, summary.window), summary=summary)
        for name, (run, summary) in zip(names, runs, strict=True)
    ]
    comparison = compare([run for run, _ in runs], [summary for _, summary in runs])
    return Page(
        title=" against ".join([*names[1:], names[0]]) if len(names) == 2 else f"{len(names)} runs side by side",
        subtitle=" · ".join(f"{arm.name}: {arm.summary.info.system}, {arm.summary.info.target}" for arm in arms),
        verdict=tuple(_verdicts(comparison, names)),
        warnings=tuple(f"{arm.name}: {warning}" for arm in arms for warning in _warnings(arm)),
        sections=(
            PageSection(title="Overview", panels=(*_bar_panels(arms), _table_panel(comparison, names))),
            PageSection(title="Latency", panels=tuple(_distributions(arms))),
            PageSection(title="Over time", panels=tuple(_over_time(arms))),
            PageSection(title="Where the time goes", panels=(_phases_panel(arms),)),
        ),
        settings={arm.name: asdict(arm.summary.info) for arm in arms},
    )


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: its own, numbered where several are equal."""
    given = [run.info.name for run in runs]
    return [
        name if given.count(name) == 1 else f"{name} ({given[: place + 1].count(name)})"
        for place, name in enumerate(given)
    ]


def _warnings(arm: _Arm) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*arm.summary.warnings, *arm.summary.info.generator.warnings)))


def _verdicts(comparison: RunComparison, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each run but the first on figures that differ by more than chance."""
    for place, name in enumerate(names[1:], 1):
        changed = []
        for row in comparison.rows:
            if row.kind == ALL and row.name in _VERDICT and row.is_significant(place):
                changed.append(f"{_WORDS.get(row.name, row.name)} {_changed(row, place)}")
        found = "; ".join(changed) if changed else "no headline figure differs by more than chance"
        yield f"{name} against {names[0]}: {found}."


def _table_panel(comparison: RunComparison, names: Sequence[str]) -> Panel:
    columns = ["measure", "kind", names[0]]
    for name in names[1:]:
        columns += [name, f"{name} against {names[0]}"]
    strong = frozenset(
        index
        for index, row in enumerate(comparison.rows)
        if any(row.is_significant(place) for place in range(1, len(names)))
    )
    return Panel(
        title="Side by side",
        look_for="Rows in bold differ by more than equal systems would in 19 of 20 cases.",
        content=Table(
            columns=tuple(columns),
            rows=tuple(tuple(_cells(row)) for row in comparison.rows),
            text_columns=frozenset(["kind"]),
            strong_rows=strong,
        ),
        note=f"{comparison.pairing(names)} Intervals (95 %) cover the variation within these runs, not between runs at"
        " different times.",
    )


def _cells(row: Row) -> Iterator[str]:
    yield row.name
    yield row.kind
    for place, cell in enumerate(row.cells):
        yield value_text(row, cell)
        if place:
            yield _changed(row, place)


def _changed(row: Row, place: int) -> str:
    """Return the change of a run against the first and, where it is certain, "better" or "worse"."""
    text = change_text(row, row.cells[place], "({} to {})")
    return text + {None: "", True: ", better", False: ", worse"}[row.verdict(place)]


def _bar_panels(arms: Sequence[_Arm]) -> tuple[Panel, ...]:
    overall = [arm.summary.overall for arm in arms]
    return (
        Panel(
            title="Goodput",
            look_for="Requests per second within both objectives; whiskers that do not overlap are a difference.",
            content=_bars(
                arms, [kind.goodput_per_s for kind in overall], Axis(unit=axes.Unit.RATE, starts_at_zero=True)
            ),
            width=Width.HALF,
        ),
        Panel(
            title="Within both objectives",
            look_for="Shares are only comparable at the same offered load.",
            content=_bars(arms, [kind.good_share for kind in overall], Axis(unit=axes.Unit.SHARE, starts_at_zero=True)),
            width=Width.HALF,
        ),
    )


def _bars(arms: Sequence[_Arm], estimates: Sequence[Estimate], axis: Axis) -> Any:
    """Return a bar with whiskers for each run."""
    num_arms = len(arms)
    series = []
    for place, (arm, estimate) in enumerate(zip(arms, estimates, strict=True)):
        values, low, high = (np.full(num_arms, np.nan) for _ in range(3))
        values[place], low[place], high[place] = estimate.value, estimate.low, estimate.high
        series.append(Bars(name=arm.name, values=values, color=arm.color, low=low, high=high))
    figure = bar_figure([arm.name for arm in arms], series, Frame(y=axis, height=300), mode="overlay")
    figure.update_layout(showlegend=False)
    return figure


def _distributions(arms: Sequence[_Arm]) -> Iterator[Panel]:
    slos = {arm.summary.slo for arm in arms}
    slo = slos.pop() if len(slos) == 1 else None
    for measure in Measure:
        samples = list(_samples(arms, measure))
        limits = () if slo is None else measure.limits(slo)
        frame = Frame(x=Axis(title="time", unit=axes.Unit.SECONDS, scale=Scale.LOG), x_limits=limits, height=380)
        yield Panel(
            title=measure.value,
            look_for="The curve further left is faster; where curves cross, one is better for most, one in the tail.",
            content=ecdf_figure(samples, frame, measure.scale)
            if samples
            else Absent(why="no request was answered completely"),
            width=Width.HALF,
        )


def _samples(arms: Sequence[_Arm], measure: Measure) -> Iterator[ValueSample]:
    """Yield a sample per run and kind; runs differ by colour, kinds by dash. Empty samples are left out."""
    kinds = sorted({kind for arm in arms for kind in arm.columns.kinds})
    shown: list[str | None] = [*kinds] if 1 < len(kinds) <= MAX_KINDS else [None]
    for arm in arms:
        for kind, dash in zip(shown, DASHES, strict=False):
            values = arm.columns.measured(measure, kind)
            if values.size:
                name = arm.name if kind is None else f"{arm.name}, {kind}"
                yield ValueSample(name=name, values=values, color=arm.color, dash=dash)


def _over_time(arms: Sequence[_Arm]) -> Iterator[Panel]:
    latency = Axis(unit=axes.Unit.SECONDS, scale=Scale.LOG)
    curves: dict[str, list[Curve]] = {"TTFT": [], "ITL": []}
    for arm in arms:
        columns = arm.columns
        has = columns.is_complete & ~np.isnan(columns.ttft_s)
        for name, at_s, values in (
            ("TTFT", columns.due_s[has], columns.ttft_s[has]),
            ("ITL", columns.gaps.end_s, columns.gaps.gap_s),
        ):
            curves[name] += rolling_curves(f"{arm.name}, ", at_s, values, color=arm.color)
    for name, drawn in curves.items():
        yield Panel(
            title=f"{name} over time",
            look_for="Lines that drift apart: one run keeps up with the load, the other does not.",
            content=line_figure(drawn, Frame(x=RUN_TIME, y=latency, height=320)),
            note="Percentiles of each sixtieth of the run, warm-up included.",
        )
    yield Panel(
        title="Open requests",
        look_for="Requests that are due and have not ended. With equal arrivals, the lower line serves them sooner.",
        content=line_figure(
            [
                Curve(name=arm.name, x=at_s, y=num_open, color=arm.color, shape="hv")
                for arm in arms
                for at_s, num_open in (open_requests(arm.columns),)
            ],
            Frame(x=RUN_TIME, y=Axis(title="requests", unit=axes.Unit.COUNT, starts_at_zero=True), height=280),
        ),
    )


def _phases_panel(arms: Sequence[_Arm]) -> Panel:
    title = "Mean time in each phase"
    found = [arm for arm in arms if (arm.columns.is_measured & ~np.isnan(arm.columns.server("queue_s"))).any()]
    if not found:
        return Panel(title=title, content=Absent(why="no target reports its own time stamps"))
    groups = {arm.name: [arm.columns.requests[row] for row in np.flatnonzero(arm.columns.is_measured)] for arm in found}
    return Panel(
        title=title,
        look_for="A larger part of a bar is where a run loses time; pink is the transfer that prefill did not hide.",
        content=phases_figure(groups, tuple(Phase)),
        note="From sending to end, complete requests. Targets that report no time stamps are left out.",
    )

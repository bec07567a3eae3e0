"""Panels on latencies, of one run by kind or of several runs: distributions, over prompt length, over time."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from measure.load.report.columns import Arm, Floats, Measure, Series
from measure.pages.axes import RUN_TIME, Axis, Scale, Unit
from measure.pages.distributions import ValueSample, ecdf_figure, rolling, scatter_indices
from measure.pages.figures import Curve, Frame, LimitLine, compact, dots, line_figure, new_figure, plain
from measure.pages.page import Absent, Panel, Width
from measure.pages.theme import GREY, LIMIT, PURPLE, colors_of, translucent

_NO_ANSWER = Absent(why="no request was answered completely")
_NUM_BINS = 60
_LOOK_FOR = {
    Measure.TTFT: "The height at which a curve crosses the objective is the share of requests in time.",
    Measure.TPOT: "Mean gap of a request, to which the objective applies.",
    Measure.ITL: "Single gaps: a long tail to the right of the objective means answers that stutter.",
    Measure.E2E: "Time to the complete answer, which depends on its length.",
}
_OVER_TIME = {
    Measure.TTFT: "A curve that climbs from left to right is a growing queue: the load is above capacity.",
    Measure.ITL: "Where p99 jumps and p50 does not, something delayed a few steps: a long prompt, a transfer.",
}


def distribution_panels(arms: Sequence[Arm], series: Sequence[Series]) -> Iterator[Panel]:
    """Yield a panel per measure, over the counted complete requests."""
    for measure in Measure:
        samples = [
            ValueSample(name=one.name, values=values, color=one.color, dash=one.dash)
            for one in series
            if (values := one.arm.columns.measured(measure, one.kind)).size
        ]
        frame = Frame(
            x=Axis(title="time", unit=Unit.SECONDS, scale=Scale.LOG), x_limits=_limits(arms, measure), height=380
        )
        yield Panel(
            title=measure.value,
            look_for=_LOOK_FOR[measure],
            content=ecdf_figure(samples, frame) if samples else _NO_ANSWER,
            width=Width.HALF,
        )


def prompt_length_panel(arm: Arm) -> Panel:
    """Return TTFT against prompt length."""
    columns, slo = arm.columns, arm.summary.slo
    has = columns.is_counted & columns.is_complete & ~np.isnan(columns.ttft_s)
    title = "TTFT by prompt length"
    if not has.any():
        return Panel(title=title, content=_NO_ANSWER)
    figure = cloud_figure(
        {kind: np.flatnonzero(has & columns.of_kind(kind)) for kind in columns.kinds},
        (columns.num_prompt_tokens, columns.ttft_s),
        Frame(
            x=Axis(title="prompt tokens", unit=Unit.TOKENS, scale=Scale.LOG),
            y=Axis(title="TTFT", unit=Unit.SECONDS, scale=Scale.LOG),
        ),
    )
    lengths = columns.num_prompt_tokens[has]
    places = np.geomspace(max(1.0, lengths.min()), max(2.0, lengths.max()), 60)
    figure.add_scatter(
        x=compact(places),
        y=compact([slo.ttft_of(int(length)) for length in places]),
        mode="lines",
        name="objective",
        line={"color": LIMIT, "dash": "dot", "width": 1.5},
        hovertemplate=f"objective: {Unit.SECONDS.shows('y')}<extra></extra>",
    )
    return Panel(
        title=title,
        look_for="Short prompts with the TTFT of long ones are queued behind them.",
        content=figure,
    )


def over_time_panels(arms: Sequence[Arm], series: Sequence[Series]) -> Iterator[Panel]:
    """Yield latencies over time, then open requests."""
    for measure, look_for in _OVER_TIME.items():
        curves = [curve for one in series for curve in _rolling_curves(one, measure)]
        frame = Frame(
            x=RUN_TIME, y=Axis(unit=Unit.SECONDS, scale=Scale.LOG), y_limits=_limits(arms, measure), height=340
        )
        yield Panel(
            title=f"{measure.name} over time",
            look_for=look_for,
            content=_shaded(line_figure(curves, frame), arms) if curves else _NO_ANSWER,
            note="Percentiles of each sixtieth of the run. Shaded: not counted in the summary.",
        )
    yield _open_panel(arms)


def cloud_figure(rows: dict[str, Any], values: tuple[Floats, Floats], frame: Frame) -> Any:
    """Return a scatter plot of the requests in `rows`, by name; the highest of too many are drawn."""
    figure = new_figure(frame)
    x, y = values
    num_points = sum(own.size for own in rows.values())
    for name, color in colors_of(rows).items():
        shown = rows[name][scatter_indices(y[rows[name]], 1500)]
        figure.add_scatter(
            x=compact(x[shown]),
            y=compact(y[shown]),
            mode="markers",
            name=plain(name),
            marker=dots(color, num_points),
            hovertemplate=f"{frame.x.unit.shows('x')}: {frame.y.unit.shows('y')}<extra>{plain(name)}</extra>",
        )
    return figure


def _limits(arms: Sequence[Arm], measure: Measure) -> tuple[LimitLine, ...]:
    """Return the objective, where all runs have the same."""
    slos = {arm.summary.slo for arm in arms}
    return measure.limits(slos.pop()) if len(slos) == 1 else ()


def _rolling_curves(series: Series, measure: Measure) -> Iterator[Curve]:
    """Yield the median and the 99th percentile over time."""
    bins = rolling(*series.arm.columns.over_time(measure, series.kind), percentiles=(50.0, 99.0), num_bins=_NUM_BINS)
    for p, dash in ((50.0, "dot"), (99.0, "solid")):
        if bins.at_s.size:
            yield Curve(name=f"{series.name}, p{p:g}", x=bins.at_s, y=bins.values[p], color=series.color, dash=dash)


def _open_panel(arms: Sequence[Arm]) -> Panel:
    curves = []
    for arm in arms:
        prefix, columns = "" if len(arms) == 1 else f"{arm.run.info.name}, ", arm.columns
        at_s, num_open = columns.open_requests()
        curves.append(Curve(name=f"{prefix}due and not ended", x=at_s, y=num_open, color=arm.color, shape="hv"))
        if (failed := ~columns.is_complete).any():
            ends, edges = np.histogram(columns.end_s[failed], np.linspace(0, columns.last_s, _NUM_BINS + 1))
            name = f"{prefix}not complete, in each sixtieth of the run"
            curves.append(Curve(name=name, x=edges[:-1], y=ends, color=LIMIT, dash="dot", shape="hv"))
        if len(arms) == 1 and arm.run.samples:
            moments, queued = zip(*((sample.at_s, sample.num_queued) for sample in arm.run.samples), strict=True)
            curves.append(Curve(name="in the router's line", x=moments, y=queued, color=PURPLE, shape="hv"))
    frame = Frame(x=RUN_TIME, y=Axis(title="requests", unit=Unit.COUNT, starts_at_zero=True), height=320)
    return Panel(
        title="Open requests",
        look_for="Below capacity the line of open requests goes up and down but does not climb.",
        content=_shaded(line_figure(curves, frame), arms),
    )


def _shaded(figure: Any, arms: Sequence[Arm]) -> Any:
    """Return the figure of a run with the times shaded that its summary leaves out; that of several as it is."""
    if len(arms) == 1:
        (arm,) = arms
        window, end_s = arm.summary.window, arm.columns.last_s
        for start_s, stop_s in ((0.0, window.start_s), (window.end_s, end_s)):
            if stop_s - start_s > 0.005 * end_s:
                figure.add_vrect(x0=start_s, x1=stop_s, fillcolor=translucent(GREY, 0.13), line_width=0, layer="below")
        figure.update_xaxes(range=[0, 1.005 * end_s])
    return figure

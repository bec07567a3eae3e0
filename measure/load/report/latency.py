"""Panels on latencies: distributions, TTFT by prompt length, and latencies over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly.subplots import make_subplots

from common.slo import Slo
from measure.load.records import PoolSample
from measure.load.report.columns import Measure, RequestColumns, known, objective, open_requests, rolling_curves
from measure.load.window import Window
from measure.pages.axes import RUN_TIME, Axis, Scale, Unit
from measure.pages.distributions import ValueSample, ecdf_figure, scatter_indices
from measure.pages.figures import Curve, Frame, add_curve, compact, dots, line_figure, new_figure, plain
from measure.pages.page import Absent, Panel, Width
from measure.pages.theme import BLUE, GREY, LIMIT, PURPLE, colors_of, translucent

_NO_ANSWER = "no request was answered completely"
_LOOK_FOR = {
    Measure.TTFT: "The height at which a curve crosses the objective is the share of requests in time.",
    Measure.TPOT: "Mean gap of a request, to which the objective applies.",
    Measure.ITL: "Single gaps: a long tail to the right of the objective means answers that stutter.",
    Measure.E2E: "Time to the complete answer, which depends on its length.",
}


def distribution_panels(columns: RequestColumns, slo: Slo) -> tuple[Panel, ...]:
    """Return a panel per measure, over the counted complete requests."""
    return tuple(_distribution(columns, measure, slo) for measure in Measure)


def prompt_length_panel(columns: RequestColumns, slo: Slo) -> Panel:
    """Return TTFT against prompt length."""
    rows = np.flatnonzero(columns.is_measured & ~np.isnan(columns.ttft_s))
    title = "TTFT by prompt length"
    if not rows.size:
        return Panel(title=title, content=Absent(why=_NO_ANSWER), width=Width.HALF)
    frame = Frame(x=Axis(title="prompt tokens", unit=Unit.TOKENS, scale=Scale.LOG), y=_log_time("TTFT"), height=360)
    figure = new_figure(frame)
    for kind, color in colors_of(columns.kinds).items():
        of_kind = rows[columns.kind[rows] == kind]
        shown = of_kind[scatter_indices(columns.ttft_s[of_kind], 1500)]
        figure.add_scatter(
            x=compact(columns.num_prompt_tokens[shown]),
            y=compact(columns.ttft_s[shown]),
            mode="markers",
            name=plain(kind),
            marker=dots(color, rows.size),
            hovertemplate=f"<b>{plain(kind)}</b><br>%{{x:,}} tokens: {Unit.SECONDS.shows('y')}<extra></extra>",
        )
    lengths = columns.num_prompt_tokens[rows].astype(np.float64)
    places = np.geomspace(max(1.0, lengths.min()), max(2.0, lengths.max()), 60)
    figure.add_scatter(
        x=compact(places),
        y=compact([slo.ttft_of(int(length)) for length in places]),
        mode="lines",
        name="objective",
        line={"color": LIMIT, "dash": "dot", "width": 1.5},
        hovertemplate=f"objective: {Unit.SECONDS.shows('y')}<extra></extra>",
    )
    figure.update_xaxes(frame.x.ticks(lengths))
    figure.update_yaxes(frame.y.ticks(np.append(columns.ttft_s[rows], slo.ttft_s)))
    return Panel(
        title=title,
        look_for="Short prompts with the TTFT of long ones are queued behind them.",
        content=figure,
    )


def over_time_panels(
    columns: RequestColumns, slo: Slo, window: Window, samples: Sequence[PoolSample]
) -> tuple[Panel, ...]:
    """Return latencies over time, then arrivals and queues."""
    return (
        _ttft_over_time(columns, slo, window),
        _itl_over_time(columns, slo, window),
        _traffic_over_time(columns, window, samples),
    )


def shade_uncounted(figure: Any, window: Window, end_s: float) -> None:
    """Shade the times that the summary leaves out. Mutates the figure."""
    for start_s, stop_s in ((0.0, window.start_s), (window.end_s, end_s)):
        if stop_s - start_s > 0.005 * end_s:
            figure.add_vrect(x0=start_s, x1=stop_s, fillcolor=translucent(GREY, 0.13), line_width=0, layer="below")


def _ttft_over_time(columns: RequestColumns, slo: Slo, window: Window) -> Panel:
    frame = Frame(
        x=RUN_TIME,
        y=_log_time("TTFT"),
        y_limits=(objective(slo.ttft_s),),
        height=360,
    )
    figure = new_figure(frame)
    has = ~np.isnan(columns.ttft_s) & columns.is_complete
    num_shown = 0
    for kind, color in colors_of(columns.kinds).items():
        rows = np.flatnonzero(has & columns.of_kind(kind))
        shown = rows[scatter_indices(columns.ttft_s[rows])]
        num_shown += shown.size
        figure.add_scatter(
            x=compact(columns.due_s[shown]),
            y=compact(columns.ttft_s[shown]),
            mode="markers",
            name=plain(kind),
            marker=dots(color, columns.ttft_s.size),
            hovertemplate=f"due {Unit.CLOCK.shows('x')}: {Unit.SECONDS.shows('y')}<extra>{plain(kind)}</extra>",
        )
    for curve in rolling_curves("", columns.due_s[has], columns.ttft_s[has], color=PURPLE):
        add_curve(figure, curve, frame)
    _add_failures(figure, columns)
    figure.update_yaxes(frame.y.ticks(np.append(known(columns.ttft_s), slo.ttft_s)))
    _finish(figure, columns, window)
    note = (
        f"{num_shown:,} of {int(has.sum()):,} points are drawn, the highest among them."
        if num_shown < has.sum()
        else ""
    )
    return Panel(
        title="TTFT over time",
        look_for="A cloud that climbs from left to right is a growing queue: the load is above capacity.",
        content=figure,
        note=f"{note} Shaded: not counted in the summary. Crosses at the lower edge have no latency.".strip(),
    )


def _itl_over_time(columns: RequestColumns, slo: Slo, window: Window) -> Panel:
    gaps = columns.gaps
    if not gaps.gap_s.size:
        return Panel(title="ITL over time", content=Absent(why="every answer came in one piece"))
    frame = Frame(
        x=RUN_TIME,
        y=_log_time("gap"),
        y_limits=(objective(slo.tpot_s),),
        height=320,
    )
    curves: list[Curve] = []
    for kind, color in colors_of(columns.kinds).items():
        of_kind = columns.kind[gaps.request] == kind
        curves += rolling_curves(f"{kind}, ", gaps.end_s[of_kind], gaps.gap_s[of_kind], color=color)
    figure = line_figure(curves, frame)
    _finish(figure, columns, window)
    return Panel(
        title="ITL over time",
        look_for="Where p99 jumps and p50 does not, something delayed a few steps: a long prompt, a transfer.",
        content=figure,
        note="Percentiles of the gaps that ended in each sixtieth of the run.",
    )


def _traffic_over_time(columns: RequestColumns, window: Window, samples: Sequence[PoolSample]) -> Panel:
    end_s = max(1e-3, float(columns.end_s.max(initial=0.0)))
    edges = np.linspace(0, end_s, 61)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for name, color, times in (
        ("due", translucent(GREY, 0.6), columns.due_s),
        ("not complete", LIMIT, columns.due_s[~columns.is_complete]),
    ):
        if not times.size:
            continue
        figure.add_bar(
            x=compact((edges[:-1] + edges[1:]) / 2),
            y=compact(np.histogram(times, edges)[0] / edges[1]),
            name=name,
            marker={"color": color, "line": {"width": 0}},
            hovertemplate=f"{name}: %{{y:.2f}}/s<extra></extra>",
        )
    at_s, num_open = open_requests(columns)
    lines = [("open (due, not ended)", at_s, num_open, BLUE)]
    if samples:
        queued = np.array([sample.num_queued for sample in samples], dtype=np.float64)
        lines.append(("in the router's queue", np.array([s.at_s for s in samples]), queued, PURPLE))
    for name, x, y, color in lines:
        figure.add_scatter(
            x=compact(x),
            y=compact(y),
            name=name,
            mode="lines",
            line={"color": color, "width": 1.6, "shape": "hv"},
            hovertemplate=f"{name}: %{{y:,.0f}}<extra></extra>",
            row=2,
            col=1,
        )
    figure.update_layout(template=None, height=400, barmode="overlay", bargap=0, hovermode="x unified")
    figure.update_yaxes(title="per second", rangemode="tozero", row=1)
    figure.update_yaxes(title="requests", rangemode="tozero", row=2)
    figure.update_xaxes(RUN_TIME.layout(), row=2)
    _finish(figure, columns, window)
    return Panel(
        title="Arrivals and open requests",
        look_for="Below capacity the line of open requests goes up and down but does not climb.",
        content=figure,
    )


def _add_failures(figure: Any, columns: RequestColumns) -> None:
    """Mark incomplete requests along the lower edge: they have no latency."""
    height = 0.7 * float(known(columns.ttft_s).min(initial=1.0))
    rows = np.flatnonzero(~columns.is_complete)
    if not rows.size:
        return
    shown = rows[:: -(-rows.size // 2000)]
    figure.add_scatter(
        x=compact(columns.due_s[shown]),
        y=compact(np.full(shown.size, height)),
        mode="markers",
        name="not complete",
        marker={"color": LIMIT, "symbol": "x", "size": 7},
        text=[plain(f"{columns.requests[row].outcome}: {columns.requests[row].error}"[:160]) for row in shown],
        hovertemplate=f"due {Unit.CLOCK.shows('x')}<br>%{{text}}<extra></extra>",
    )


def _finish(figure: Any, columns: RequestColumns, window: Window) -> None:
    end_s = float(columns.end_s.max(initial=0.0))
    figure.update_xaxes(range=[0, 1.005 * end_s])
    shade_uncounted(figure, window, end_s)


def _log_time(title: str) -> Axis:
    return Axis(title=title, unit=Unit.SECONDS, scale=Scale.LOG)


def _distribution(columns: RequestColumns, measure: Measure, slo: Slo) -> Panel:
    samples = [
        ValueSample(name=kind, values=columns.measured(measure, kind), color=color)
        for kind, color in colors_of(columns.kinds).items()
    ]
    if not any(len(sample.values) for sample in samples):
        return Panel(title=measure.value, content=Absent(why=_NO_ANSWER), width=Width.HALF)
    frame = Frame(x=_log_time("time"), x_limits=measure.limits(slo), height=380)
    is_longer = measure is Measure.TTFT and np.any(columns.num_prompt_tokens > slo.ttft_tokens)
    return Panel(
        title=measure.value,
        look_for=_LOOK_FOR[measure],
        content=ecdf_figure(samples, frame, measure.scale),
        note=f"The objective grows with prompts above {slo.ttft_tokens:,} tokens." if is_longer else "",
        width=Width.HALF,
    )

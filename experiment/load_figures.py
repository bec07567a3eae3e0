"""Plots over the load: what was served well, how fast, and how busy the workers were."""

from collections.abc import Callable, Sequence

import numpy as np

from experiment.analysis import Findings
from experiment.curves import Reading
from experiment.looks import Shown, shown_arms
from experiment.points import KindPoint, Latency, Point
from loadtest.estimates import Estimate
from reporting.axes import Axis, Scale, Unit
from reporting.figures import Curve, Frame, Limit, compact, line_figure
from reporting.page import Absent, Panel, Width
from reporting.theme import GREY
from reporting.wording import count, percent
from workload.slo import Slo

_MANY_DECADES = 8.0
"""Loads that span more than such a factor are drawn on a logarithmic axis."""


def goodput_panel(findings: Sequence[Findings]) -> Panel:
    """Return good requests per second against the load."""
    shown = shown_arms(findings)
    load = _load_axis(shown)
    frame = Frame(
        x=load,
        y=Axis(title="good requests", unit=Unit.RATE, scale=load.scale, starts_at_zero=True),
        height=460,
    )
    figure = line_figure([_curve(arm, lambda reading: reading.goodput) for arm in shown], frame)
    loads = np.array([reading.load for arm in shown for reading in arm.finding.curve.readings])
    ends = [loads.min(), loads.max()]
    figure.add_scatter(
        x=compact(ends),
        y=compact(ends),
        mode="lines",
        name="all of the load",
        line={"color": GREY, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    return Panel(
        title="Goodput",
        look_for="As long as an arm serves its load well, its curve is on the dotted line; where it leaves that is its"
        " knee.",
        content=figure,
        note="Requests that were answered to their ends within both objectives. Bands are 95 % intervals. Filled marks:"
        " measured; hollow ones: simulated.",
    )


def share_panel(findings: Sequence[Findings]) -> Panel:
    """Return the share of good requests against the load, with the share that is wanted."""
    shown, share = shown_arms(findings), findings[0].share
    frame = Frame(
        x=_load_axis(shown),
        y=Axis(title="good requests of all", unit=Unit.SHARE),
        y_limits=(Limit(value=share, text=f"{percent(share, 0)} wanted"),),
    )
    figure = line_figure([_curve(arm, lambda reading: reading.good_share) for arm in shown], frame)
    figure.update_yaxes(range=[0, 1.03])
    return Panel(
        title="Share of good requests",
        look_for="An arm's capacity is where its curve falls through the red line.",
        content=figure,
    )


def latency_panels(findings: Sequence[Findings], slo: Slo | None) -> tuple[Panel, ...]:
    """Return p99 of first tokens and of gaps against the load, of everybody and of each kind."""
    shown = shown_arms(findings)
    kinds = list(dict.fromkeys(kind for arm in shown for kind in _kinds(arm)))
    kinds = kinds if len(kinds) > 2 else kinds[:1]  # one kind is everybody
    ttft_limit = () if slo is None else (Limit(value=slo.ttft_s, text="objective, short prompts"),)
    itl_limit = () if slo is None else (Limit(value=slo.itl_s, text="objective of the mean gap"),)
    panels = []
    for kind in kinds:
        whose = "everybody" if kind == "all" else kind
        panels += [
            _latency_panel(shown, kind, _ttft, f"First token, {whose}: p99", ttft_limit),
            _latency_panel(shown, kind, _itl, f"Gap between tokens, {whose}: p99", itl_limit),
        ]
    return tuple(panels)


def busy_panels(findings: Sequence[Findings]) -> tuple[Panel, ...]:
    """Return how busy the pools were, and how full."""
    shown = shown_arms(findings)
    return (
        _mean_panel(
            shown,
            lambda point: point.prefill_busy,
            "Prefill pool: time in steps",
            "Above nine tenths prompts wait for each other.",
        ),
        _mean_panel(
            shown,
            lambda point: point.decode_busy,
            "Decode pool: time in steps",
            "A decode worker steps while it has one answer to write: busy is not full.",
        ),
        _mean_panel(
            shown, lambda point: point.kv_peak, "KV pages in use, fullest worker", "At 100 % answers wait for a place."
        ),
        _mean_panel(shown, lambda point: point.token_hit, "Prompt tokens found in a cache", "Less to compute."),
    )


def handoff_panels(findings: Sequence[Findings]) -> tuple[Panel, ...]:
    """Return what moving KV costs."""
    shown = [arm for arm in shown_arms(findings) if arm.finding.arm.num_prefill]
    exposed = _mean_panel(
        shown,
        lambda point: point.transfer_exposed_p50_s,
        "Time that prefill does not hide, median",
        "So much later the first token comes because KV moves.",
        unit=Unit.SECONDS,
    )
    moved = _mean_panel(
        shown,
        lambda point: point.transfer_bytes / point.overall.num_requests if point.overall.num_requests else None,
        "KV moved per request",
        "What is cached at the decode worker does not move.",
        unit=Unit.BYTES,
    )
    return exposed, moved


def _mean_panel(
    shown: Sequence[Shown],
    pick: Callable[[Point], float | None],
    title: str,
    look_for: str,
    *,
    unit: Unit = Unit.SHARE,
) -> Panel:
    curves = [_curve(arm, lambda reading: _exact(reading.mean_of(pick))) for arm in shown]
    if not any(len(curve.x) for curve in curves):
        return Panel(title=title, content=Absent(why="nobody says"), width=Width.HALF)
    frame = Frame(x=_load_axis(shown), y=Axis(unit=unit, starts_at_zero=True), height=320)
    figure = line_figure(curves, frame)
    if unit is Unit.SHARE:
        figure.update_yaxes(range=[0, 1.03])
    return Panel(title=title, look_for=look_for, content=figure, width=Width.HALF)


def _latency_panel(
    shown: Sequence[Shown],
    kind: str,
    pick: Callable[[KindPoint], Latency | None],
    title: str,
    limits: tuple[Limit, ...],
) -> Panel:
    curves = [_curve(arm, lambda reading: reading.latency(kind, pick)) for arm in shown]
    if not any(len(curve.x) for curve in curves):
        return Panel(title=title, content=Absent(why="nothing was answered"), width=Width.HALF)
    frame = Frame(x=_load_axis(shown), y=Axis(unit=Unit.SECONDS, scale=Scale.LOG), y_limits=limits, height=340)
    return Panel(
        title=title,
        content=line_figure(curves, frame),
        note="Mean of the runs; bands from the least to the greatest of them.",
        width=Width.HALF,
    )


def _curve(arm: Shown, pick: Callable[[Reading], Estimate | None]) -> Curve:
    """Return a curve over the loads at which something is known."""
    known = [(reading, estimate) for reading in arm.finding.curve.readings if (estimate := pick(reading)) is not None]
    return Curve(
        name=arm.name,
        x=[reading.load for reading, _ in known],
        y=[estimate.value for _, estimate in known],
        low=[estimate.low for _, estimate in known],
        high=[estimate.high for _, estimate in known],
        color=arm.color,
        symbol=arm.symbol,
        dash=arm.dash,
        texts=[
            f"{count(len(reading.points), 'run')}, {count(reading.num_requests, 'request')}" for reading, _ in known
        ],
    )


def _exact(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value=value, low=value, high=value)


def _load_axis(shown: Sequence[Shown]) -> Axis:
    loads = [reading.load for arm in shown for reading in arm.finding.curve.readings]
    is_wide = bool(loads) and max(loads) > _MANY_DECADES * min(loads)
    return Axis(title="load, requests", unit=Unit.RATE, scale=Scale.LOG if is_wide else Scale.LINEAR)


def _kinds(arm: Shown) -> tuple[str, ...]:
    return tuple(kind for reading in arm.finding.curve.readings for kind in reading.kinds)


def _ttft(kind: KindPoint) -> Latency | None:
    return kind.ttft


def _itl(kind: KindPoint) -> Latency | None:
    return kind.itl

"""Plots that compare arms: capacity by shape and by ratio, and what gives way first."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from measure.experiment.analysis import ArmFinding, Findings, diagnose
from measure.experiment.analysis import Limit as Cause
from measure.experiment.payoff import reach_text
from measure.experiment.points import MeanUnit, Source
from measure.pages.axes import Axis, Scale, Unit
from measure.pages.figures import Curve, Frame, add_curve, compact, line_figure, new_figure, plain, whiskers
from measure.pages.page import Absent, Panel, Width
from measure.pages.theme import BLUE, GREY, MAGENTA, ORANGE, PALETTE, PURPLE, SAND, TEAL
from measure.pages.wording import number, percent

_CAUSE_COLORS = {
    Cause.NOTHING: TEAL,
    Cause.PREFILL: BLUE,
    Cause.DECODE: ORANGE,
    Cause.MEMORY: MAGENTA,
    Cause.WORKERS: SAND,
}
_ROW = 26
"""Height of an arm's row in pixels."""


def reach_panel(findings: Findings) -> Panel:
    """Return each arm's capacity per worker."""
    title = f"Capacity for each {findings.unit}"
    known = [arm for arm in findings.arms if arm.reach.load]
    if not known:
        return Panel(title=title, content=Absent(why="no arm served any of its loads"))
    figure = new_figure(
        Frame(
            x=Axis(title=f"requests for each {findings.unit}", unit=Unit.RATE, starts_at_zero=True),
            height=120 + _ROW * len(known),
        )
    )
    rows = list(reversed(known))
    values = [min(arm.reach.load, arm.reach.highest) / arm.reach.num_units for arm in rows]
    highs = [
        max(value, (arm.reach.highest if arm.reach.high is None else arm.reach.high) / arm.reach.num_units)
        for arm, value in zip(rows, values, strict=True)
    ]
    figure.add_bar(
        y=[plain(arm.arm.name) for arm in rows],
        x=compact(values),
        orientation="h",
        marker=_bar_marker(rows, findings.source),
        error_x=whiskers(values, [arm.reach.low / arm.reach.num_units for arm in rows], highs),
        text=[plain(reach_text(arm.reach)) for arm in rows],
        textposition="none",
        hovertemplate=f"<b>%{{y}}</b><br>%{{x:.3r}}/s for each {findings.unit}<br>%{{text}} in all<extra></extra>",
        showlegend=False,
    )
    figure.update_yaxes(type="category", tickformat="", ticksuffix="")
    beyond = [arm.arm.name for arm in known if not arm.reach.is_bracketed]
    left_out = [arm.arm.name for arm in findings.arms if not arm.reach.load]
    equally = "" if findings.unit is MeanUnit.ARM else " with equal resources"
    return Panel(
        title=title,
        look_for=f"The longest bar serves most{equally}; grey arms are aggregated."
        f" {percent(findings.share, 0)} of the requests were good.",
        content=figure,
        note="Whiskers are 95 % intervals."
        + (f" Bars end at the highest load that was measured: {', '.join(beyond)} served it." if beyond else "")
        + (f" Left out: {', '.join(left_out)} served none." if left_out else ""),
    )


def ratio_panel(findings: Findings) -> Panel:
    """Return capacity per worker against the share of prefill workers, a curve for each size."""
    title = "By the share of prefill workers"
    known = [arm for arm in findings.arms if arm.reach.is_bracketed and not arm.arm.is_external]
    sizes = sorted({arm.arm.num_workers for arm in known if arm.arm.num_prefill})
    if not sizes:
        return Panel(title=title, content=Absent(why="no split was seen at its limit"), width=Width.HALF)
    curves = [_size_curve(size, index, known, findings.source) for index, size in enumerate(sizes)]
    frame = Frame(
        x=Axis(title="prefill workers of all; 0: aggregated", unit=Unit.SHARE),
        y=Axis(title=f"requests for each {findings.unit}", unit=Unit.RATE, starts_at_zero=True),
        height=420,
    )
    figure = line_figure(curves, frame)
    for curve in (_whole_mark(size, index, known) for index, size in enumerate(sizes)):
        if curve is not None:
            add_curve(figure, curve, frame)
            figure.data[-1].showlegend = False
    figure.update_xaxes(range=[-0.04, 1.0])
    return Panel(
        title=title,
        look_for="The highest point is the best ratio; squares at the left edge are aggregated arms of these sizes.",
        content=figure,
        width=Width.HALF,
    )


def grid_panel(findings: Findings) -> Panel:
    """Return capacity per worker by prefill and decode workers."""
    title = "By prefill and decode workers"
    known = {
        (arm.arm.num_prefill, arm.arm.num_decode): arm
        for arm in sorted(findings.arms, key=lambda arm: arm.reach.load)
        if arm.reach.is_bracketed and arm.arm.num_prefill
    }
    prefills, decodes = (sorted({pools[side] for pools in known}) for side in (0, 1))
    if len(known) < 3:
        return Panel(
            title=title, content=Absent(why="fewer than three splits were seen at their limits"), width=Width.HALF
        )
    values = [[_per_unit(known.get((row, column))) for column in decodes] for row in prefills]
    figure = new_figure(Frame(x=Axis(title="decode workers"), y=Axis(title="prefill workers"), height=420))
    figure.add_trace(
        go.Heatmap(
            x=[f"{each}D" for each in decodes],
            y=[f"{each}P" for each in prefills],
            z=values,
            text=[["" if value is None else number(value) for value in row] for row in values],
            texttemplate="%{text}",
            colorscale="Viridis",
            colorbar={"title": {"text": f"per {findings.unit}, /s"}},
            hovertemplate=f"<b>%{{y}}%{{x}}</b><br>%{{z:.3r}}/s for each {findings.unit}<extra></extra>",
            hoverongaps=False,
        )
    )
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(type="category", tickformat="", ticksuffix="", showgrid=False)
    return Panel(
        title=title,
        look_for=f"Brighter is better: capacity for each {findings.unit}.",
        content=figure,
        width=Width.HALF,
    )


def limit_panel(findings: Findings) -> Panel:
    """Return the limit of each arm at each load."""
    figure = new_figure(
        Frame(
            x=Axis(title=f"load for each {findings.unit}, requests", unit=Unit.RATE, scale=Scale.LOG),
            height=130 + _ROW * len(findings.arms),
        )
    )
    names = [plain(arm.arm.name) for arm in findings.arms]
    found: dict[Cause, list[tuple[str, float, str]]] = {cause: [] for cause in Cause}
    for name, arm in zip(names, findings.arms, strict=True):
        for reading in arm.curve.readings:
            diagnosis = diagnose(reading, arm.curve, share=findings.share)
            place = reading.load / arm.reach.num_units
            found[diagnosis.limit].append((name, place, f"{reading.load:g}/s: {diagnosis.why}"))
    for cause, places in found.items():
        if places:
            figure.add_scatter(
                x=compact([place for _, place, _ in places]),
                y=[name for name, _, _ in places],
                text=[plain(why) for _, _, why in places],
                name=cause.value,
                mode="markers",
                marker={"color": _CAUSE_COLORS[cause], "size": 13, "symbol": "square"},
                hovertemplate=f"<b>%{{y}}</b>: {cause.value}<br>%{{text}}<extra></extra>",
            )
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1], tickformat="", ticksuffix="")
    all_loads = [place for places in found.values() for _, place, _ in places]
    figure.update_xaxes(Axis(unit=Unit.RATE, scale=Scale.LOG).ticks(np.array(all_loads)))
    return Panel(
        title="What gives way first",
        look_for="The load grows from left to right; the first square that is not green shows what is too small.",
        content=figure,
        note="Prefill: first tokens late or requests refused. Decode: gaps too long. KV memory: the same as prefill,"
        " while prefill workers have time left and a decode worker's pages are full.",
    )


def _per_unit(arm: ArmFinding | None) -> float | None:
    return None if arm is None else arm.reach.per_unit


def _bar_marker(arms: Sequence[ArmFinding], source: Source) -> dict[str, Any]:
    colors = [PURPLE if arm.arm.is_external else PALETTE[0] if arm.arm.num_prefill else GREY for arm in arms]
    if source is Source.REAL:
        return {"color": colors}
    return {"color": colors, "opacity": 0.75, "line": {"color": colors, "width": 1.5}}


def _size_curve(size: int, index: int, known: Sequence[ArmFinding], source: Source) -> Curve:
    """Return the best split of each ratio, for one number of workers."""
    best: dict[float, ArmFinding] = {}
    for arm in known:
        if arm.arm.num_workers == size and arm.arm.num_prefill:
            share = arm.arm.num_prefill / size
            if share not in best or best[share].reach.load < arm.reach.load:
                best[share] = arm
    shares = sorted(best)
    arms = [best[share] for share in shares]
    return Curve(
        name=f"{size} workers",
        x=shares,
        y=[arm.reach.per_unit for arm in arms],
        low=[arm.reach.low / size for arm in arms],
        high=[(arm.reach.high if arm.reach.high is not None else arm.reach.load) / size for arm in arms],
        color=PALETTE[index % len(PALETTE)],
        symbol="circle" if source is Source.REAL else "circle-open",
        texts=[arm.arm.name for arm in arms],
    )


def _whole_mark(size: int, index: int, known: Sequence[ArmFinding]) -> Curve | None:
    """Return the best aggregated arm of one number of workers as a mark; None without one."""
    wholes = [arm for arm in known if arm.arm.num_workers == size and not arm.arm.num_prefill]
    if not wholes:
        return None
    best = max(wholes, key=lambda arm: arm.reach.load)
    return Curve(
        name=best.arm.name,
        x=[0.0],
        y=[best.reach.per_unit],
        color=PALETTE[index % len(PALETTE)],
        symbol="square",
    )

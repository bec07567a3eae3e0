"""Figures for pages: curves with bands, bars. Each function returns a plotly figure.

Names come from users and are escaped, since plotly interprets tags in texts.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from measure.pages.axes import Axis, Scale
from measure.pages.theme import GREY, LIMIT, PALETTE, translucent

Floats = npt.NDArray[np.float64]
Numbers = Sequence[float] | Floats
HEIGHT = 380
_MANY_DOTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line, with a band where it is uncertain."""

    name: str
    x: Numbers
    y: Numbers
    color: str = PALETTE[0]
    dash: str = "solid"
    symbol: str | None = None
    shape: str = "linear"
    """"hv": a value holds until the next one."""
    low: Numbers | None = None
    high: Numbers | None = None
    """Bounds of the band; both or neither."""
    texts: Sequence[str] = ()
    """Additional hover text, one per point."""
    labels: Sequence[str] = ()
    """Labels beside the points, one each; empty: none."""
    is_hidden: bool = False
    """Whether only the legend has it, until it is chosen there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitLine:
    """A line across the figure: an objective, a capacity."""

    value: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One series of bars: a value for each category."""

    name: str
    values: Numbers
    color: str = PALETTE[0]
    low: Numbers | None = None
    high: Numbers | None = None
    """Ends of the whiskers; both or neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Axes and size of a figure, and the limits that cross it."""

    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    x_limits: tuple[LimitLine, ...] = ()
    y_limits: tuple[LimitLine, ...] = ()
    height: int = HEIGHT


def plain(text: str) -> str:
    """Return a text escaped, so that plotly shows its tags literally."""
    return html.escape(text)


def compact(values: Numbers) -> npt.NDArray[np.float32]:
    """Return values in the precision of pages: seven digits are enough for a plot."""
    return np.asarray(values, dtype=np.float32)


def dots(color: str, num_points: int) -> dict[str, Any]:
    """Return plotly's marker for a scatter plot: many points are smaller and fainter."""
    return {"color": color} | ({"size": 5, "opacity": 0.45} if num_points > _MANY_DOTS else {"size": 7, "opacity": 0.8})


def new_figure(frame: Frame) -> Any:
    """Return a figure without data: axes, size, limits."""
    figure = go.Figure()
    figure.update_layout(template=None, height=frame.height, xaxis=frame.x.layout(), yaxis=frame.y.layout())
    line = {"color": LIMIT, "width": 1.2, "dash": "dot"}
    for limit in frame.x_limits:
        place = _place(limit.value, frame.x)
        figure.add_vline(x=limit.value, line=line)
        figure.add_annotation(_limit_text(limit), x=place, y=0.02, yref="paper", yanchor="bottom", textangle=-90)
    for limit in frame.y_limits:
        place = _place(limit.value, frame.y)
        figure.add_hline(y=limit.value, line=line)
        figure.add_annotation(_limit_text(limit), y=place, x=0.005, xref="paper", yanchor="bottom")
    return figure


def _place(value: float, axis: Axis) -> float:
    """Return the position of an annotation: logarithmic axes take exponents."""
    return math.log10(value) if axis.scale is Scale.LOG else value


def _limit_text(limit: LimitLine) -> dict[str, Any]:
    font = {"color": LIMIT, "size": 11}
    return {"text": plain(limit.text), "font": font, "showarrow": False, "xanchor": "left"}


def line_figure(curves: Sequence[Curve], frame: Frame) -> Any:
    """Return curves over a common axis. Empty curves are left out."""
    figure = new_figure(frame)
    for curve in curves:
        if len(curve.x):
            add_curve(figure, curve, frame)
    return figure


def add_curve(figure: Any, curve: Curve, frame: Frame) -> None:
    """Draw a curve and its band. Mutates the figure."""
    name = plain(curve.name)
    if curve.low is not None and curve.high is not None:
        figure.add_scatter(
            x=compact(np.concatenate([np.asarray(curve.x), np.asarray(curve.x)[::-1]])),
            y=compact(np.concatenate([np.asarray(curve.high), np.asarray(curve.low)[::-1]])),
            mode="lines",
            fill="toself",
            fillcolor=translucent(curve.color, 0.15),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
        )
    marker = {"symbol": curve.symbol, "size": 8} if curve.symbol else None
    extra = "<br>%{hovertext}" if curve.texts else ""
    mode = ("lines+markers" if curve.symbol else "lines") + ("+text" if curve.labels else "")
    figure.add_scatter(
        x=compact(curve.x),
        y=compact(curve.y),
        name=name,
        legendgroup=name,
        mode=mode,
        line={"color": curve.color, "dash": curve.dash, "width": 2, "shape": curve.shape},
        marker=marker,
        text=[plain(text) for text in curve.labels] or None,
        textposition="top right",
        textfont={"color": curve.color, "size": 10},
        hovertext=[plain(text) for text in curve.texts] or None,
        visible="legendonly" if curve.is_hidden else None,
        hovertemplate=f"<b>{name}</b><br>{frame.x.unit.shows('x')}: {frame.y.unit.shows('y')}{extra}<extra></extra>",
    )


def bar_figure(categories: Sequence[str], series: Sequence[Bars], frame: Frame, *, mode: str = "group") -> Any:
    """Return bars over categories; `mode` is plotly's barmode: "group" or "stack"."""
    figure = new_figure(frame)
    names = [plain(category) for category in categories]
    for bars in series:
        figure.add_bar(
            x=names,
            y=compact(bars.values),
            name=plain(bars.name),
            marker={"color": bars.color},
            error_y=None if bars.low is None or bars.high is None else whiskers(bars.values, bars.low, bars.high),
            hovertemplate=f"<b>%{{x}}</b><br>{plain(bars.name)}: {frame.y.unit.shows('y')}<extra></extra>",
        )
    figure.update_layout(barmode=mode)
    figure.update_xaxes(type="category", tickformat="", ticksuffix="")
    return figure


def whiskers(values: Numbers, low: Numbers, high: Numbers) -> dict[str, Any]:
    """Return plotly's error bars from `low` to `high`."""
    return {
        "type": "data",
        "symmetric": False,
        "array": compact(np.asarray(high) - np.asarray(values)),
        "arrayminus": compact(np.asarray(values) - np.asarray(low)),
        "color": GREY,
        "thickness": 1.5,
        "width": 4,
    }

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
from plotly.subplots import make_subplots

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
    drawn = [curve for curve in curves if len(curve.x)]
    for curve in drawn:
        add_curve(figure, curve, frame)
    figure.update_xaxes(ticks_of(frame.x, [curve.x for curve in drawn], frame.x_limits))
    figure.update_yaxes(ticks_of(frame.y, [curve.y for curve in drawn], frame.y_limits))
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
    extra = "<br>%{text}" if curve.texts else ""
    figure.add_scatter(
        x=compact(curve.x),
        y=compact(curve.y),
        name=name,
        legendgroup=name,
        mode="lines+markers" if curve.symbol else "lines",
        line={"color": curve.color, "dash": curve.dash, "width": 2, "shape": curve.shape},
        marker=marker,
        text=[plain(text) for text in curve.texts] or None,
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


def small_plots(titles: Sequence[str], *, num_columns: int, row_height: int) -> Any:
    """Return a figure of small plots with common axes; `row_column` has the place of each."""
    columns = min(num_columns, len(titles))
    rows = -(-len(titles) // columns)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        shared_xaxes=True,
        shared_yaxes=True,
        subplot_titles=[plain(title) for title in titles],
        horizontal_spacing=0.04,
        vertical_spacing=min(0.12, 0.35 / rows),
    )
    figure.update_layout(template=None, height=130 + row_height * rows)
    figure.update_annotations(font_size=12)
    return figure


def row_column(index: int, num_titles: int, *, num_columns: int) -> dict[str, int]:
    """Return the place of the `index`-th of `small_plots`."""
    row, column = divmod(index, min(num_columns, num_titles))
    return {"row": row + 1, "col": column + 1}


def ticks_of(axis: Axis, parts: Sequence[Numbers], limits: Sequence[LimitLine]) -> dict[str, Any]:
    """Return the ticks of an axis over these values and limits; see `Axis.ticks`."""
    values = [np.asarray(part, dtype=np.float64) for part in parts]
    return axis.ticks(np.concatenate([*values, [limit.value for limit in limits]]))


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

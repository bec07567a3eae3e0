"""Distributions as curves, from data thinned without visible change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from measure.pages.axes import Axis, Scale, Unit
from measure.pages.figures import Floats, Frame, Numbers, compact, new_figure, plain
from measure.pages.theme import PALETTE

MAX_CURVE_POINTS = 900
EXACT_TAIL_POINTS = 300
MAX_SCATTER_POINTS = 3000


def ecdf(values: Floats) -> tuple[Floats, Floats]:
    """Return (sorted values, share of values at most as large) of the empirical distribution.

    With more than `MAX_CURVE_POINTS` values, it keeps the largest `EXACT_TAIL_POINTS`, which show the high percentiles,
    and evenly spaced ranks of the rest.
    """
    ordered = np.sort(values)
    size = ordered.size
    if size <= MAX_CURVE_POINTS:
        ranks = np.arange(size)
    else:
        num_even = MAX_CURVE_POINTS - EXACT_TAIL_POINTS
        even = np.linspace(0, size - EXACT_TAIL_POINTS, num_even, endpoint=False).astype(np.int64)
        ranks = np.concatenate([even, np.arange(size - EXACT_TAIL_POINTS, size)])
    return ordered[ranks], (ranks + 1) / max(1, size)


def scatter_indices(y: Floats, max_points: int = MAX_SCATTER_POINTS) -> npt.NDArray[np.int64]:
    """Return the indices of the points to draw, in order: the highest tenth of `max_points`, else every k-th."""
    if y.size <= max_points:
        return np.arange(y.size)
    num_high = max_points // 10
    high = np.argpartition(y, y.size - num_high)[y.size - num_high :]
    even = np.linspace(0, y.size - 1, max_points - num_high).astype(np.int64)
    return np.union1d(high, even)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """Percentiles in each interval of time; intervals without values are left out."""

    at_s: Floats
    values: dict[float, Floats]


def rolling(at_s: Floats, values: Floats, *, percentiles: tuple[float, ...], num_bins: int = 60) -> Rolling:
    """Return percentiles over time, in `num_bins` equal intervals from the first to the last moment."""
    if not at_s.size:
        return Rolling(at_s=at_s, values=dict.fromkeys(percentiles, values))
    edges = np.linspace(at_s.min(), at_s.max() + 1e-9, num_bins + 1)
    bins = np.clip(np.searchsorted(edges, at_s, side="right") - 1, 0, num_bins - 1)
    order = np.argsort(bins, kind="stable")
    filled, starts = np.unique(bins[order], return_index=True)
    groups = np.split(values[order], starts[1:])
    table = np.array([np.percentile(group, percentiles) for group in groups])
    return Rolling(
        at_s=(edges[filled] + edges[filled + 1]) / 2,
        values={percentile: table[:, index] for index, percentile in enumerate(percentiles)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSample:
    """Values of one distribution."""

    name: str
    values: Numbers
    color: str = PALETTE[0]
    dash: str = "solid"


def ecdf_figure(samples: Sequence[ValueSample], frame: Frame) -> Any:
    """Return empirical distribution functions as curves. `frame.y` is replaced.

    Buttons show all of it, or the slowest tenth. Hovering shows the percentile. Empty samples are left out.
    """
    figure = new_figure(replace(frame, y=Axis(title="share of values up to x", unit=Unit.SHARE)))
    for sample in samples:
        values = np.asarray(sample.values, dtype=np.float64)
        if not values.size:
            continue
        x, shares = ecdf(values)
        name = plain(sample.name)
        figure.add_scatter(
            x=compact(np.maximum(x, 1e-6) if frame.x.scale is Scale.LOG else x),
            y=compact(shares),
            name=name,
            legendgroup=name,
            mode="lines",
            line={"color": sample.color, "dash": sample.dash, "width": 2, "shape": "hv"},
            hovertemplate=f"<b>{name}</b><br>%{{y:.4~p}} at most {frame.x.unit.shows('x')}<extra></extra>",
        )
    views = {"all": [0, 1.005], "tail": [0.9, 1.0005]}
    buttons = [{"label": label, "method": "relayout", "args": [{"yaxis.range": view}]} for label, view in views.items()]
    figure.update_yaxes(range=views["all"], tickformat="~p")
    figure.update_layout(updatemenus=[{"buttons": buttons, "active": 0}])
    return figure

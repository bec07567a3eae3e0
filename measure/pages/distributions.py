"""Distributions as curves, on an even scale and on one of the tail, from data thinned without visible change."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from measure.pages.axes import Axis, Scale, Unit
from measure.pages.figures import Floats, Frame, Numbers, compact, new_figure, plain, ticks_of
from measure.pages.theme import PALETTE

MAX_CURVE_POINTS = 900
EXACT_TAIL_POINTS = 300
MAX_SCATTER_POINTS = 3000
_MAX_NINES = 5


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


class ShareScale(enum.StrEnum):
    """Scale of shares."""

    EVEN = "even"
    TAIL = "tail"
    """By nines: 90 %, 99 % and 99.9 % are equally spaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSample:
    """Values of one distribution."""

    name: str
    values: Numbers
    color: str = PALETTE[0]
    dash: str = "solid"


def ecdf_figure(samples: Sequence[ValueSample], frame: Frame, scale: ShareScale = ShareScale.EVEN) -> Any:
    """Return empirical distribution functions as curves. `frame.y` is replaced.

    Buttons change the scale. Hovering shows the percentile. Empty samples are left out.
    """
    figure = new_figure(replace(frame, y=Axis(title="share of values up to x", unit=Unit.SHARE)))
    figure.update_xaxes(ticks_of(frame.x, [sample.values for sample in samples], frame.x_limits))
    heights: dict[ShareScale, list[Floats]] = {each: [] for each in ShareScale}
    most = 1
    for sample in samples:
        values = np.asarray(sample.values, dtype=np.float64)
        if not values.size:
            continue
        x, shares = ecdf(values)
        most = max(most, values.size)
        heights[ShareScale.EVEN].append(shares)
        heights[ShareScale.TAIL].append(-np.log10(np.maximum(1 - shares, 0.5 / values.size)))
        name = plain(sample.name)
        figure.add_scatter(
            x=compact(np.maximum(x, 1e-6) if frame.x.scale is Scale.LOG else x),
            y=compact(heights[scale][-1]),
            customdata=compact(shares),
            name=name,
            legendgroup=name,
            mode="lines",
            line={"color": sample.color, "dash": sample.dash, "width": 2, "shape": "hv"},
            hovertemplate=f"<b>{name}</b><br>%{{customdata:.4~p}} at most {frame.x.unit.shows('x')}<extra></extra>",
        )
    axes = {ShareScale.EVEN: _even_axis(), ShareScale.TAIL: _tail_axis(most)}
    figure.update_yaxes(axes[scale])
    if any(heights.values()):
        figure.update_layout(updatemenus=[_buttons(heights, axes, scale)])
    return figure


def _even_axis() -> dict[str, Any]:
    places = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    return {"tickvals": places, "ticktext": [f"{place:.0%}" for place in places], "range": [0, 1.005]}


def _tail_axis(num_values: int) -> dict[str, Any]:
    """Return an axis of nines, up to the last one that this many values resolve."""
    num_nines = min(_MAX_NINES, max(1, int(np.log10(num_values))))
    shares = [0.0, 0.5, *(1 - 10.0**-nines for nines in range(1, num_nines + 1))]
    return {
        "tickvals": [float(-np.log10(1 - share)) for share in shares],
        "ticktext": [f"{100 * share:.{max(0, place - 3)}f}%" for place, share in enumerate(shares)],
        "range": [0, min(_MAX_NINES, float(np.log10(2 * num_values))) * 1.02],
    }


def _buttons(
    heights: dict[ShareScale, list[Floats]], axes: dict[ShareScale, dict[str, Any]], scale: ShareScale
) -> dict[str, Any]:
    labels = {ShareScale.EVEN: "all", ShareScale.TAIL: "tail"}
    buttons = [
        {
            "label": labels[each],
            "method": "update",
            "args": [
                {"y": [np.round(height, 5).tolist() for height in heights[each]]},
                {f"yaxis.{key}": value for key, value in axes[each].items()},
            ],
        }
        for each in ShareScale
    ]
    return {"buttons": buttons, "active": list(ShareScale).index(scale)}

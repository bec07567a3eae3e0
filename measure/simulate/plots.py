"""The plots of a comparison."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from measure.load.records import RequestRecord
from measure.pages.axes import Axis, Scale, Unit
from measure.pages.distributions import ValueSample, ecdf_figure
from measure.pages.figures import (
    Curve,
    Frame,
    LimitLine,
    compact,
    line_figure,
    new_figure,
    plain,
    row_column,
    small_plots,
)
from measure.pages.theme import colors_of, dash_of, symbol_of
from measure.simulate.comparison import CellResult
from measure.simulate.results import count_cached_tokens

_LOAD_BINS = 60
_SPEED = Axis(title="speed of the trace", unit=Unit.PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedCell:
    """A cell and the data of its plots."""

    result: CellResult
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    load: Mapping[str, np.ndarray]
    """Prompt tokens to compute that each worker got, by equal parts of the run."""

    @property
    def policy(self) -> str:
        """Policy of the cell."""
        return self.result.cell.policy

    @property
    def speed(self) -> float:
        """Speed of the cell."""
        return self.result.cell.speed


class _Look(NamedTuple):
    """Look of a policy in all plots."""

    color: str
    dash: str
    symbol: str


def plotted_cell(result: CellResult, requests: Iterable[RequestRecord]) -> PlottedCell:
    """Return a cell with the data of its plots."""
    rows = list(requests)
    complete = [row for row in rows if row.is_complete]
    edges = np.linspace(0, max((row.due_s for row in rows), default=0.0) + 1e-9, _LOAD_BINS + 1)
    arrivals: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        worker = row.server.prefill_worker or row.server.decode_worker
        if worker and count_cached_tokens(row) < row.num_prompt_tokens:
            arrivals[worker].append(row.due_s)
            tokens[worker].append(row.num_prompt_tokens - count_cached_tokens(row))
    return PlottedCell(
        result=result,
        ttft_s=np.array([row.ttft_s for row in complete if row.ttft_s is not None]),
        tpot_s=np.array([row.tpot_s for row in complete if row.tpot_s is not None]),
        load={
            worker: np.histogram(arrivals[worker], bins=edges, weights=tokens[worker])[0] for worker in sorted(arrivals)
        },
    )


def good_share_by_speed(plotted: Sequence[PlottedCell]) -> Any:
    """Return the share of good requests against the trace's speed."""
    figure = line_figure(
        _by_speed(plotted, lambda cell: cell.result.summary.figures.good_share),
        Frame(x=_SPEED, y=Axis(title="good requests of all", unit=Unit.SHARE)),
    )
    figure.update_yaxes(range=[0, 1.01])
    return figure


def goodput_by_speed(plotted: Sequence[PlottedCell]) -> Any:
    """Return the rate of good requests against the trace's speed."""
    axis = Axis(title="goodput, requests", unit=Unit.RATE, starts_at_zero=True)
    return line_figure(_by_speed(plotted, lambda cell: cell.result.summary.goodput_per_s), Frame(x=_SPEED, y=axis))


def ttft_curves(plotted: Sequence[PlottedCell], slo_s: float) -> Any:
    """Return the distributions of TTFT, for cells of one speed; answered requests only."""
    return _curves([(cell.policy, cell.ttft_s) for cell in plotted], "TTFT", slo_s)


def tpot_curves(plotted: Sequence[PlottedCell], slo_s: float) -> Any:
    """Return the distributions of TPOT, for cells of one speed; answered requests only."""
    return _curves([(cell.policy, cell.tpot_s) for cell in plotted], "mean gap between tokens", slo_s)


def hits_and_balance(plotted: Sequence[PlottedCell]) -> Any:
    """Return hit rate against hot spot, a point per cell, larger at higher speeds."""
    frame = Frame(
        x=Axis(title="hot spot: workers × largest share of computed tokens"),
        y=Axis(title="token hit", unit=Unit.SHARE),
        height=420,
    )
    figure = new_figure(frame)
    speeds = sorted({cell.speed for cell in plotted})
    for policy, cells, look in _by_policy(plotted):
        figure.add_scatter(
            x=compact([cell.result.summary.hot_spot for cell in cells]),
            y=compact([cell.result.summary.token_hit for cell in cells]),
            mode="markers",
            name=plain(policy),
            showlegend=True,
            marker={
                "color": look.color,
                "symbol": look.symbol,
                "size": [9 + 4 * speeds.index(cell.speed) for cell in cells],
                "opacity": 0.85,
            },
            text=[f"speed {cell.speed:g}" for cell in cells],
            hovertemplate=f"<b>{plain(policy)}</b>, %{{text}}<br>hot spot %{{x:.2f}}, hit %{{y:.1%}}<extra></extra>",
        )
    return figure


def load_over_time(plotted: Sequence[PlottedCell]) -> Any:
    """Return the tokens to compute that each worker got, for cells of one speed, a small plot per policy."""
    figure = small_plots([cell.policy for cell in plotted], num_columns=3, row_height=170)
    colors = colors_of(worker for cell in plotted for worker in sorted(cell.load))
    drawn: set[str] = set()
    for index, cell in enumerate(plotted):
        for worker, tokens in cell.load.items():
            figure.add_scatter(
                x=compact(np.arange(len(tokens)) / _LOAD_BINS),
                y=compact(tokens),
                name=plain(worker),
                legendgroup=worker,
                showlegend=worker not in drawn,
                mode="lines",
                line={"color": colors[worker], "width": 1.2},
                hovertemplate=f"{plain(worker)}: %{{y:,.0f}} tokens<extra>{plain(cell.policy)}</extra>",
                **row_column(index, len(plotted), num_columns=3),
            )
            drawn.add(worker)
    figure.update_xaxes(tickformat=".0%")
    figure.update_yaxes(tickformat="~s", rangemode="tozero")
    return figure


def _by_speed(plotted: Sequence[PlottedCell], of: Callable[[PlottedCell], float]) -> list[Curve]:
    return [
        Curve(name=policy, x=[cell.speed for cell in cells], y=[of(cell) for cell in cells], **look._asdict())
        for policy, cells, look in _by_policy(plotted)
    ]


def _curves(values: Sequence[tuple[str, np.ndarray]], title: str, slo_s: float) -> Any:
    looks = _looks(policy for policy, _ in values)
    return ecdf_figure(
        [
            ValueSample(name=policy, values=times, color=looks[policy].color, dash=looks[policy].dash)
            for policy, times in values
        ],
        Frame(
            x=Axis(title=title, unit=Unit.SECONDS, scale=Scale.LOG),
            x_limits=(LimitLine(value=slo_s, text=f"objective {Unit.SECONDS.text(slo_s)}"),),
        ),
    )


def _by_policy(plotted: Sequence[PlottedCell]) -> Iterator[tuple[str, list[PlottedCell], _Look]]:
    groups: dict[str, list[PlottedCell]] = defaultdict(list)
    for cell in plotted:
        groups[cell.policy].append(cell)
    looks = _looks(groups)
    for policy, cells in groups.items():
        yield policy, sorted(cells, key=lambda cell: cell.speed), looks[policy]


def _looks(policies: Iterable[str]) -> dict[str, _Look]:
    return {
        policy: _Look(color, dash_of(index), symbol_of(index))
        for index, (policy, color) in enumerate(colors_of(policies).items())
    }

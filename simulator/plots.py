"""The plots of a comparison, as SVG. Needs matplotlib, the `report` extra."""

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from simulator.records import RequestResult
from simulator.replay import CellResult

_COLORS = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]
_MARKERS = "os^Dv<>Phd"
_CURVE_POINTS = 200
_LOAD_BINS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A cell and what plots need of its requests."""

    result: CellResult
    ttft_s: np.ndarray
    itl_s: np.ndarray
    load: Mapping[str, np.ndarray]
    """Prompt tokens to compute that each worker was sent, by equal parts of the run's arrivals."""

    @property
    def policy(self) -> str:
        """Of the cell."""
        return self.result.cell.policy

    @property
    def speed(self) -> float:
        """Of the cell."""
        return self.result.cell.speed


def outcome(result: CellResult, requests: Iterable[RequestResult]) -> Outcome:
    """Return a cell with the curves of its requests."""
    rows = list(requests)
    complete = [row for row in rows if row.is_complete]
    edges = np.linspace(0, max((row.arrival_s for row in rows), default=0.0) + 1e-9, _LOAD_BINS + 1)
    arrivals: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        worker = row.prefill_worker or row.decode_worker
        if worker and row.num_cached_tokens < row.num_prompt_tokens:
            arrivals[worker].append(row.arrival_s)
            tokens[worker].append(row.num_prompt_tokens - row.num_cached_tokens)
    return Outcome(
        result=result,
        ttft_s=np.array([row.ttft_s for row in complete if row.ttft_s is not None]),
        itl_s=np.array([row.itl_s for row in complete if row.itl_s is not None]),
        load={
            worker: np.histogram(arrivals[worker], bins=edges, weights=tokens[worker])[0] for worker in sorted(arrivals)
        },
    )


def goodput_by_speed(outcomes: Sequence[Outcome]) -> str:
    """Return the share and the rate of good requests against the trace's speed."""
    figure = Figure(figsize=(12, 4.2))
    share, rate = figure.subplots(1, 2)
    for policy, cells, style in _by_policy(outcomes):
        speeds = [cell.speed for cell in cells]
        share.plot(speeds, [100 * cell.result.summary.good_share for cell in cells], label=policy, **style)
        rate.plot(speeds, [cell.result.summary.goodput_per_s for cell in cells], label=policy, **style)
    share.set(xlabel="speed", ylabel="good requests, % of all", ylim=(0, 101))
    rate.set(xlabel="speed", ylabel="goodput, requests/s", ylim=(0, None))
    return _svg(figure, share, rate)


def latency_curves(outcomes: Sequence[Outcome], *, slo_ttft_s: float, slo_itl_s: float) -> str:
    """Return the distributions of TTFT and of mean gaps, for cells of one speed; answered requests only."""
    figure = Figure(figsize=(12, 4.2))
    ttft, itl = figure.subplots(1, 2)
    for policy, cells, style in _by_policy(outcomes):
        line = style | {"marker": ""}
        for axes, values in ((ttft, cells[0].ttft_s), (itl, 1000 * cells[0].itl_s)):
            if values.size:
                shares = np.linspace(0, 100, _CURVE_POINTS)
                axes.plot(np.percentile(values, shares), shares, label=policy, **line)
    ttft.axvline(slo_ttft_s, color="gray", linestyle=":")
    itl.axvline(1000 * slo_itl_s, color="gray", linestyle=":")
    ttft.set(xscale="log", xlabel="TTFT, s", ylabel="% of answered requests", ylim=(0, 101))
    itl.set(xscale="log", xlabel="mean gap between tokens, ms", ylim=(0, 101))
    for axes in (ttft, itl):
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    itl.xaxis.set_minor_formatter(FuncFormatter(_plain))  # gaps often span less than a decade
    return _svg(figure, ttft, itl)


def hits_and_balance(outcomes: Sequence[Outcome]) -> str:
    """Return hit rate against hot spot, a point per cell, larger at higher speeds."""
    figure = Figure(figsize=(7.5, 4.5))
    axes = figure.subplots()
    speeds = sorted({cell.speed for cell in outcomes})
    for policy, cells, style in _by_policy(outcomes):
        axes.scatter(
            [cell.result.summary.hot_spot for cell in cells],
            [100 * cell.result.summary.token_hit for cell in cells],
            s=[25 + 25 * speeds.index(cell.speed) for cell in cells],
            color=style["color"],
            marker=style["marker"],
            alpha=0.8,
            label=policy,
        )
    axes.set(xlabel="hot spot (workers × largest share of computed tokens)", ylabel="token hit, %")
    axes.set_xlim(left=min(0.98, axes.get_xlim()[0]))
    return _svg(figure, axes)


def load_over_time(outcomes: Sequence[Outcome]) -> str:
    """Return, for cells of one speed, how many tokens to compute each worker was sent, a small plot per policy."""
    num_columns = min(3, len(outcomes))
    num_rows = -(-len(outcomes) // num_columns)
    figure = Figure(figsize=(12, 2.2 * num_rows + 0.6))
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True)
    for axes, cell in zip(grid.flat, outcomes, strict=False):
        for index, (worker, tokens) in enumerate(cell.load.items()):
            axes.plot(np.arange(len(tokens)), tokens / 1000, color=_COLORS[index % 20], linewidth=0.9, label=worker)
        axes.set_title(cell.policy, fontsize=9)
    for axes in grid.flat[len(outcomes) :]:
        axes.set_visible(False)
    figure.supxlabel(f"time, 1/{_LOAD_BINS} of the trace", fontsize=9)
    figure.supylabel("tokens to compute, thousands", fontsize=9)
    return _svg(figure)


def _plain(value: float, _position: int | None) -> str:
    return f"{value:g}"


def _by_policy(outcomes: Sequence[Outcome]) -> Iterable[tuple[str, list[Outcome], dict[str, Any]]]:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for cell in outcomes:
        groups[cell.policy].append(cell)
    for index, (policy, cells) in enumerate(groups.items()):
        color, marker = _COLORS[(2 * index) % 20 + (index >= 10)], _MARKERS[index % len(_MARKERS)]
        yield (
            policy,
            sorted(cells, key=lambda cell: cell.speed),
            {"color": color, "marker": marker, "markersize": 4, "linewidth": 1.3},
        )


def _svg(figure: Figure, *axes: Axes) -> str:
    """Return the drawing; the last axes get a legend at their side. Equal figures give equal text."""
    for each in axes:
        each.grid(alpha=0.3)
    if axes:
        axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "kvrelay", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]

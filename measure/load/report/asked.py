"""Panels on the requests: lengths, cache hits and failures."""

from typing import Any

import numpy as np

from measure.load.report.columns import Mask, RequestColumns
from measure.load.summary import Summary
from measure.pages.axes import RUN_TIME, Axis, Scale, Unit
from measure.pages.figures import Bars, Curve, Frame, bar_figure, compact, line_figure, new_figure, plain
from measure.pages.page import Absent, Panel, Prose, Table, Width
from measure.pages.theme import PALETTE, colors_of
from measure.pages.wording import number

_MAX_TURNS = 12
_WIDE = 5
"""Ratio of lengths above which the axis is logarithmic."""
_UNKNOWN = "the target does not report cached tokens"


def cache_panels(columns: RequestColumns) -> tuple[Panel, ...]:
    """Return cache hits by turn and over time."""
    cached = columns.server("num_cached_tokens")
    reported = columns.is_complete & ~np.isnan(cached)
    if not reported.any():
        return (Panel(title="Cache hits", content=Absent(why=_UNKNOWN)),)
    return (_by_turn(columns, cached, reported), _over_time(columns, cached, reported))


def asked_panels(columns: RequestColumns) -> tuple[Panel, ...]:
    """Return the lengths of prompts and answers."""
    wanted = np.array([request.num_wanted_tokens for request in columns.requests])
    return (
        _lengths(columns, columns.num_prompt_tokens, "Prompt lengths", "Latencies hold for prompts of these lengths."),
        _lengths(
            columns, wanted, "Answer lengths", "Long answers fill the decode pool, long prompts the prefill pool."
        ),
    )


def failures_panel(summary: Summary) -> Panel:
    """Return the table of incomplete requests by reason."""
    title = "Failures by reason"
    if not summary.failures:
        return Panel(title=title, content=Prose(paragraphs=("Every counted request was answered completely.",)))
    rows = tuple((each.outcome, each.error, f"{each.num_requests:,}") for each in summary.failures)
    return Panel(
        title=title,
        look_for="Refusals mean that the load is too high; anything else means a defect.",
        content=Table(columns=("outcome", "error", "requests"), rows=rows, text_columns=frozenset(["error"])),
        note="Messages that differ only in ids and numbers are counted together.",
    )


def _by_turn(columns: RequestColumns, cached: np.ndarray, reported: Mask) -> Panel:
    turns = np.minimum([request.turn for request in columns.requests], _MAX_TURNS - 1)
    present = sorted(set(turns[reported].tolist()))
    series = []
    for kind, color in colors_of(columns.kinds).items():
        shares = []
        for turn in present:
            rows = reported & columns.of_kind(kind) & (turns == turn)
            total = columns.num_prompt_tokens[rows].sum()
            shares.append(float(cached[rows].sum() / total) if total else np.nan)
        series.append(Bars(name=kind, values=shares, color=color))
    names = [f"{turn + 1}{' and later' if turn == _MAX_TURNS - 1 else ''}" for turn in present]
    frame = Frame(x=Axis(title="turn of the session"), y=Axis(title="of prompt tokens", unit=Unit.SHARE), height=320)
    figure = bar_figure(names, series, frame)
    figure.update_yaxes(range=[0, 1.0])
    return Panel(
        title="Cache hits by turn",
        look_for="From the second turn on, the session's history should be cached; the rest was evicted.",
        content=figure,
        width=Width.HALF,
    )


def _over_time(columns: RequestColumns, cached: np.ndarray, reported: Mask) -> Panel:
    edges = np.linspace(0, max(1e-3, float(columns.due_s.max(initial=0.0))), 41)
    curves = []
    for name, values, color in (
        ("cached", cached, PALETTE[0]),
        ("pulled from another worker", columns.server("num_pulled_tokens"), PALETTE[1]),
    ):
        total, _ = np.histogram(columns.due_s[reported], edges, weights=columns.num_prompt_tokens[reported])
        part, _ = np.histogram(columns.due_s[reported], edges, weights=np.nan_to_num(values[reported]))
        has = total > 0
        curves.append(Curve(name=name, x=((edges[1:] + edges[:-1]) / 2)[has], y=(part[has] / total[has]), color=color))
    figure = line_figure(curves, Frame(x=RUN_TIME, y=Axis(title="of prompt tokens", unit=Unit.SHARE), height=320))
    figure.update_yaxes(range=[0, 1.0])
    return Panel(
        title="Cache hits over time",
        look_for="It rises while caches fill, then stays at the steady state.",
        content=figure,
        width=Width.HALF,
    )


def _lengths(columns: RequestColumns, lengths: np.ndarray, title: str, look_for: str) -> Panel:
    if not lengths.size:
        return Panel(title=title, content=Absent(why="no request was sent"), width=Width.HALF)
    is_wide = lengths.max() > _WIDE * max(1, lengths.min())
    axis = Axis(title="tokens", unit=Unit.TOKENS, scale=Scale.LOG if is_wide else Scale.LINEAR)
    frame = Frame(x=axis, y=Axis(title="requests", unit=Unit.COUNT), height=300)
    return Panel(
        title=title,
        look_for=look_for,
        content=_histogram(columns, lengths.astype(np.float64), frame),
        note=f"Mean {number(float(lengths.mean()))}, p50 {number(float(np.median(lengths)))}, max {lengths.max():,}.",
        width=Width.HALF,
    )


def _histogram(columns: RequestColumns, lengths: np.ndarray, frame: Frame) -> Any:
    edges = _edges(lengths, frame.x.scale)
    figure = new_figure(frame)
    for kind, color in colors_of(columns.kinds).items():
        counts, _ = np.histogram(np.maximum(lengths[columns.of_kind(kind)], edges[0]), edges)
        figure.add_bar(
            x=compact((edges[:-1] + edges[1:]) / 2),
            y=compact(counts),
            width=compact(np.diff(edges)),
            name=plain(kind),
            marker={"color": color, "line": {"width": 0}},
            customdata=np.stack([np.ceil(edges[:-1]), np.ceil(edges[1:]) - 1], axis=1).astype(np.float32),
            hovertemplate=f"<b>{plain(kind)}</b><br>%{{customdata[0]:,.0f}} to %{{customdata[1]:,.0f}} tokens:"
            " %{y:,}<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(frame.x.ticks(lengths))
    return figure


def _edges(lengths: np.ndarray, scale: Scale) -> np.ndarray:
    """Return at most 40 bins; none of a linear axis is narrower than a token."""
    low, high = max(1.0, float(lengths.min())), float(lengths.max()) + 1
    if scale is Scale.LOG:
        return np.geomspace(low, high, 41)
    width = max(1.0, np.ceil((high - low) / 40))
    return np.arange(low - 0.5, high - 0.5 + width, width)

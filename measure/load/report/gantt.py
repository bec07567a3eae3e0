"""A Gantt chart of requests: one per row, phases as coloured bars, details on hover."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.slo import Slo
from measure.load.records import RequestRecord
from measure.load.report.columns import Floats, RequestColumns
from measure.load.report.handoff import PhaseSpan, hover_text, spans_of
from measure.pages.axes import RUN_TIME, Axis
from measure.pages.figures import Frame, compact, new_figure
from measure.pages.page import Absent, Panel
from measure.pages.theme import LIMIT, ORANGE, PHASE_COLORS, Phase
from measure.pages.wording import duration

MAX_ROWS, MIN_ROWS = 120, 25
_MAX_LENGTHS = 25
"""Width of the chart, in median request lengths, beyond which bars are too short to be seen."""
_MAX_STALLS = 500
_ROW_HEIGHT = 7
_PHASE_NAMES = {
    Phase.QUEUE: "queue",
    Phase.PREFILL: "prefill",
    Phase.OTHER: "network and the rest, to the first token",
    Phase.TRANSFER: "exposed transfer",
    Phase.DECODE: "decode",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Track:
    """Bars or marks of one colour."""

    owners: list[int]
    """Index of the request that each belongs to."""
    at_s: list[float]
    lengths_s: list[float] | None = None
    """Lengths of bars; None for marks."""
    look: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arrangement:
    """A layout of the requests."""

    name: str
    x_title: str
    rows: np.ndarray
    origins_s: Floats
    """Origin of the times of each request."""


def gantt_panel(columns: RequestColumns, slo: Slo) -> Panel:
    """Return the chart of at most `MAX_ROWS` consecutive requests around the one that waited longest."""
    title = "Requests through queue, prefill, transfer and decode"
    if not columns.requests:
        return Panel(title=title, content=Absent(why="no request was sent"))
    shown, note = _selection(columns)
    if not any(request.server.queue_s is not None for request in shown):
        note += " The target reports no time stamps: phases before the first token are unknown."
    return Panel(
        title=title,
        look_for="Long bars of one colour are where the time goes. Orange marks in a decode bar are gaps above the"
        " objective: look at the other requests at that moment.",
        content=_figure(shown, slo),
        note=note,
    )


def _selection(columns: RequestColumns) -> tuple[tuple[RequestRecord, ...], str]:
    """Return the requests to draw, few enough for visible bars, and a sentence that names them."""
    requests = columns.requests
    waits = np.where(columns.is_counted & ~np.isnan(columns.ttft_s), columns.ttft_s, -1.0)
    middle = int(waits.argmax())
    reach_s = _MAX_LENGTHS * float(np.median(columns.e2e_s)) / 2
    num_near = int(np.count_nonzero(np.abs(columns.due_s - columns.due_s[middle]) <= reach_s))
    num_rows = min(len(requests), max(MIN_ROWS, min(MAX_ROWS, num_near)))
    if num_rows == len(requests):
        return requests, "All requests."
    start = min(max(0, middle - num_rows // 2), len(requests) - num_rows)
    return (
        requests[start : start + num_rows],
        f"{num_rows} of {len(requests):,} requests, in the order in which they were due, around the one that waited"
        " longest for its first token.",
    )


def _figure(requests: Sequence[RequestRecord], slo: Slo) -> Any:
    height = max(320, 170 + _ROW_HEIGHT * len(requests))
    figure = new_figure(Frame(x=RUN_TIME, y=Axis(title=""), height=height))
    texts = [hover_text(request) for request in requests]
    tracks = [track for track in _tracks(requests, texts, slo) if track.owners]
    first, *_ = arrangements = _arrangements(requests)
    for track in tracks:
        rows = first.rows[track.owners]
        if track.lengths_s is None:
            figure.add_scatter(x=compact(track.at_s), y=rows, mode="markers", **track.look)
        else:
            lengths, base = compact(track.lengths_s), compact(track.at_s)
            figure.add_bar(orientation="h", base=base, x=lengths, y=rows, width=0.8, **track.look)
    figure.update_layout(barmode="overlay", updatemenus=[_menu(arrangements, tracks)])
    figure.update_yaxes(autorange="reversed", showticklabels=False, showgrid=False, zeroline=False, ticks="")
    return figure


def _tracks(requests: Sequence[RequestRecord], texts: Sequence[str], slo: Slo) -> Iterator[_Track]:
    spans: dict[Phase, list[tuple[int, PhaseSpan]]] = {phase: [] for phase in _PHASE_NAMES}
    for place, request in enumerate(requests):
        for span in spans_of(request):
            spans[span.phase].append((place, span))
    for phase, held in spans.items():
        yield _Track(
            owners=[place for place, _ in held],
            at_s=[span.start_s for _, span in held],
            lengths_s=[span.end_s - span.start_s for _, span in held],
            look={
                "name": _PHASE_NAMES[phase],
                "marker": {"color": PHASE_COLORS[phase], "line": {"width": 0}},
                "customdata": [texts[place] for place, _ in held],
                "hovertemplate": "%{customdata}<extra></extra>",
            },
        )
    yield _stalls(requests, slo)
    failed = [place for place, request in enumerate(requests) if not request.is_complete]
    yield _Track(
        owners=failed,
        at_s=[requests[place].end_s for place in failed],
        look={
            "name": "not complete",
            "marker": {"color": LIMIT, "symbol": "x", "size": 8},
            "customdata": [texts[place] for place in failed],
            "hovertemplate": "%{customdata}<extra></extra>",
        },
    )


def _stalls(requests: Sequence[RequestRecord], slo: Slo) -> _Track:
    """Return the longest gaps above the objective, as marks where they ended."""
    found = [
        (gap_s, place, end_s)
        for place, request in enumerate(requests)
        for gap_s, end_s in zip(request.gaps_s, request.chunk_s[1:], strict=True)
        if gap_s > slo.tpot_s
    ]
    longest = sorted(found, reverse=True)[:_MAX_STALLS]
    return _Track(
        owners=[place for _, place, _ in longest],
        at_s=[end_s for _, _, end_s in longest],
        look={
            "name": f"gap above {duration(slo.tpot_s)}" + (", the longest" if len(found) > len(longest) else ""),
            "marker": {"color": ORANGE, "symbol": "line-ns", "size": 7, "line": {"color": ORANGE, "width": 1.6}},
            "customdata": compact([gap_s for gap_s, _, _ in longest]),
            "hovertemplate": "gap of %{customdata:.3s}s<extra></extra>",
        },
    )


def _arrangements(requests: Sequence[RequestRecord]) -> list[_Arrangement]:
    """Return the layouts: by arrival, by workers and kinds where they differ, and aligned at their due times."""
    groupings = {
        "by arrival": [""] * len(requests),
        "by prefill worker": [request.server.prefill_worker or "" for request in requests],
        "by decode worker": [request.server.decode_worker or "" for request in requests],
        "by kind": [request.kind for request in requests],
    }
    due_s = np.array([request.due_s for request in requests])
    along = [
        _Arrangement(name=name, x_title=RUN_TIME.title, rows=_rows_by(groups, due_s), origins_s=np.zeros(len(requests)))
        for name, groups in groupings.items()
        if name == "by arrival" or len(set(groups)) > 1
    ]
    rows = np.empty(len(requests), dtype=np.int64)
    rows[np.argsort([-request.e2e_s for request in requests], kind="stable")] = np.arange(len(requests))
    name = "side by side, the longest first"
    return [*along, _Arrangement(name=name, x_title="time since it was due", rows=rows, origins_s=due_s)]


def _rows_by(groups: Sequence[str], due_s: Floats) -> np.ndarray:
    """Return the row of each request, in order of groups and due times, with an empty row between groups."""
    names = np.array(groups)
    order = np.lexsort((due_s, names))
    ordered = names[order]
    rows = np.empty(len(groups), dtype=np.int64)
    rows[order] = np.arange(1, len(groups) + 1) + np.cumsum(np.append(False, ordered[1:] != ordered[:-1]))
    return rows


def _menu(arrangements: Sequence[_Arrangement], tracks: Sequence[_Track]) -> dict[str, Any]:
    """Return buttons that move every bar and mark to its place in a layout."""
    buttons = []
    for each in arrangements:
        starts = [np.round(np.array(track.at_s) - each.origins_s[track.owners], 6).tolist() for track in tracks]
        lengths = [None if track.lengths_s is None else np.round(track.lengths_s, 6).tolist() for track in tracks]
        moved = {
            "y": [each.rows[track.owners].tolist() for track in tracks],
            "x": [start if length is None else length for start, length in zip(starts, lengths, strict=True)],
            "base": [start if length is not None else None for start, length in zip(starts, lengths, strict=True)],
        }
        layout = {"xaxis.title.text": each.x_title, "xaxis.autorange": True}
        buttons.append({"label": each.name, "method": "update", "args": [moved, layout]})
    return {"buttons": buttons, "active": 0}

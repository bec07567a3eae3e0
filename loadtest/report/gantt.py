"""A Gantt chart of requests: a row each, its phases as coloured bars, with everything known under the mouse."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from loadtest.records import RequestRecord
from loadtest.report.columns import Columns
from loadtest.report.phases import spans_of
from reporting.axes import RUN_TIME, Axis
from reporting.figures import Frame, compact, new_figure, plain
from reporting.page import Absent, Panel
from reporting.theme import BUTTONS, LIMIT, ORANGE, PHASE_COLORS, Phase
from reporting.wording import duration, scaled
from workload.slo import Slo

MAX_ROWS = 120
_ROW_HEIGHT = 7
_PHASE_NAMES = {
    Phase.QUEUE: "queue",
    Phase.PREFILL: "prefill",
    Phase.OTHER: "network and the rest, to the first token",
    Phase.TRANSFER: "transfer that shows",
    Phase.DECODE: "decode",
}
_MAX_STALLS = 500


def gantt_panel(columns: Columns, slo: Slo) -> Panel:
    """Return the chart of at most `MAX_ROWS` requests that follow each other, around the one that waited longest."""
    title = "Requests through queue, prefill, transfer and decode"
    if not columns.requests:
        return Panel(title=title, content=Absent(why="no request was sent"))
    shown, note = _selection(columns)
    has_stamps = any(request.server.queue_s is not None for request in shown)
    return Panel(
        title=title,
        look_for="Long bars of one colour are where the time goes; orange marks in a decode bar are gaps above the"
        " objective: look what the others did at that moment.",
        content=_figure(shown, slo),
        note=note
        + ("" if has_stamps else " The target tells no stamps: until the first token nothing can be told apart."),
    )


def _selection(columns: Columns) -> tuple[tuple[RequestRecord, ...], str]:
    requests = columns.requests
    if len(requests) <= MAX_ROWS:
        return requests, "All requests."
    waits = np.where(columns.is_counted & ~np.isnan(columns.ttft_s), columns.ttft_s, -1.0)
    middle = int(waits.argmax())
    start = min(max(0, middle - MAX_ROWS // 2), len(requests) - MAX_ROWS)
    return (
        requests[start : start + MAX_ROWS],
        f"{MAX_ROWS} of {len(requests):,} requests, in the order in which they were due, around the one that waited"
        " longest for its first token.",
    )


def _figure(requests: Sequence[RequestRecord], slo: Slo) -> Any:
    frame = Frame(x=RUN_TIME, y=Axis(title="request"), height=max(320, 150 + _ROW_HEIGHT * len(requests)))
    figure = new_figure(frame)
    texts = [_hover(request) for request in requests]
    orders = _orders(requests)
    rows = orders[0][1]
    held: list[list[int]] = []  # of each trace, the requests that its points belong to
    for phase, name in _PHASE_NAMES.items():
        spans = [
            (index, span) for index, request in enumerate(requests) for span in spans_of(request) if span.phase is phase
        ]
        if not spans:
            continue
        owners = [index for index, _ in spans]
        held.append(owners)
        figure.add_bar(
            orientation="h",
            base=compact([span.start_s for _, span in spans]),
            x=compact([span.end_s - span.start_s for _, span in spans]),
            y=rows[owners],
            width=0.8,
            name=name,
            marker={"color": PHASE_COLORS[phase], "line": {"width": 0}},
            customdata=[texts[index] for index in owners],
            hovertemplate="%{customdata}<extra></extra>",
        )
    for owners, trace in (_stalls(requests, slo), _failures(requests, texts)):
        if owners:
            held.append(owners)
            figure.add_scatter(y=rows[owners], **trace)
    figure.update_layout(barmode="overlay", updatemenus=_menu(orders, held))
    figure.update_yaxes(
        autorange="reversed",
        showticklabels=False,
        showgrid=False,
        zeroline=False,
        ticks="",
        title={"text": orders[0][0]},
    )
    return figure


def _orders(requests: Sequence[RequestRecord]) -> list[tuple[str, np.ndarray]]:
    """Return the ways to sort rows: (name, row of each request)."""
    orders = [("by arrival", _rows_by(requests, _nothing))]
    for name, worker in (("by prefill worker", "prefill_worker"), ("by decode worker", "decode_worker")):
        if len({getattr(request.server, worker) for request in requests}) > 1:
            orders.append((name, _rows_by(requests, partial(_worker_of, worker))))
    if len({request.kind for request in requests}) > 1:
        orders.append(("by kind", _rows_by(requests, _kind_of)))
    return orders


def _nothing(_: RequestRecord) -> str:
    return ""


def _kind_of(request: RequestRecord) -> str:
    return request.kind


def _worker_of(field: str, request: RequestRecord) -> str:
    return getattr(request.server, field) or ""


def _rows_by(requests: Sequence[RequestRecord], key: Callable[[RequestRecord], str]) -> np.ndarray:
    """Return each request's row, with an empty one between groups."""
    order = sorted(range(len(requests)), key=lambda index: (key(requests[index]), requests[index].due_s))
    rows = np.zeros(len(requests), dtype=np.int32)
    row, before = 0, key(requests[order[0]])
    for index in order:
        group = key(requests[index])
        row += 2 if group != before else 1
        rows[index], before = row, group
    return rows


def _menu(orders: Sequence[tuple[str, np.ndarray]], held: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    if len(orders) == 1:
        return []
    buttons = [
        {
            "label": name,
            "method": "update",
            "args": [{"y": [rows[list(owners)].tolist() for owners in held]}, {"yaxis.title.text": name}],
        }
        for name, rows in orders
    ]
    return [
        {
            "type": "buttons",
            "direction": "right",
            "buttons": buttons,
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "pad": {"b": 26},
            "showactive": True,
            **BUTTONS,
        }
    ]


def _stalls(requests: Sequence[RequestRecord], slo: Slo) -> tuple[list[int], dict[str, Any]]:
    """Return the gaps above the objective as marks where they ended."""
    found = [
        (gap_s, index, end_s)
        for index, request in enumerate(requests)
        for gap_s, end_s in zip(request.gaps_s, request.chunk_s[1:], strict=True)
        if gap_s > slo.itl_s
    ]
    longest = sorted(found, reverse=True)[:_MAX_STALLS]
    marks = {
        "x": compact([end_s for _, _, end_s in longest]),
        "mode": "markers",
        "name": f"gap above {duration(slo.itl_s)}" + (", the longest" if len(found) > len(longest) else ""),
        "marker": {"color": ORANGE, "symbol": "line-ns", "size": 7, "line": {"color": ORANGE, "width": 1.6}},
        "customdata": compact([gap_s for gap_s, _, _ in longest]),
        "hovertemplate": "gap of %{customdata:.3s}s<extra></extra>",
    }
    return [index for _, index, _ in longest], marks


def _failures(requests: Sequence[RequestRecord], texts: Sequence[str]) -> tuple[list[int], dict[str, Any]]:
    failed = [index for index, request in enumerate(requests) if not request.is_complete]
    marks = {
        "x": compact([requests[index].end_s for index in failed]),
        "mode": "markers",
        "name": "not complete",
        "marker": {"color": LIMIT, "symbol": "x", "size": 8},
        "customdata": [texts[index] for index in failed],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    return failed, marks


def _hover(request: RequestRecord) -> str:
    server = request.server
    cached = "" if server.num_cached_tokens is None else f" ({server.num_cached_tokens:,} cached"
    if cached:
        cached += f", {server.num_pulled_tokens:,} of them pulled)" if server.num_pulled_tokens else ")"
    lines = [
        f"<b>request {request.index}</b>: {plain(request.kind)}, session {request.session}, turn {request.turn + 1}",
        f"{request.num_prompt_tokens:,} prompt tokens{cached}, {request.num_output_tokens:,} of"
        f" {request.num_wanted_tokens:,} output tokens",
        " · ".join(
            f"{name} {duration(value)}"
            for name, value in (
                ("queue", server.queue_s),
                ("prefill", server.prefill_s),
                ("transfer", server.transfer_s),
                ("of which shows", server.transfer_exposed_s),
            )
            if value is not None
        ),
        " · ".join(
            f"{name} {duration(value)}"
            for name, value in (("TTFT", request.ttft_s), ("TPOT", request.itl_s), ("E2E", request.e2e_s))
            if value is not None
        ),
        plain(" → ".join(worker for worker in (server.prefill_worker, server.decode_worker) if worker)),
        f"{scaled(server.transfer_bytes, 'B')} by {plain(server.transport or '?')}" if server.transfer_bytes else "",
        f"sent {duration(request.lag_s)} late" if request.lag_s > 0.001 else "",
        "" if request.is_complete else f"<b>{request.outcome}</b>: {plain(request.error[:160])}",
    ]
    return "<br>".join(line for line in lines if line)

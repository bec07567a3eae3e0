"""Phases of requests, and panels on the cost of the handoff: time per phase, and the exposed part of transfers.

Only durations are taken from the server, whose clock is another one. They are laid along the client's time stamps and
begin when the request was sent; the part of TTFT that they do not cover (network, tokenizing, sampling) is `OTHER`. The
exposed part of a transfer follows the first token, which comes from the prefill worker; decode is the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from measure.figures import ALL, by_kind
from measure.load.records import RequestRecord
from measure.load.report.columns import Floats, Mask, RequestColumns
from measure.pages.axes import Axis, Scale, Unit
from measure.pages.distributions import scatter_indices
from measure.pages.figures import Bars, Frame, bar_figure, compact, dots, new_figure, plain
from measure.pages.page import Absent, Panel, Width
from measure.pages.theme import PHASE_COLORS, Phase, colors_of
from measure.pages.wording import count, duration, percent, scaled

_GROUPS = (("fastest half", 0.0, 0.5), ("p50–90", 0.5, 0.9), ("p90–99", 0.9, 0.99), ("slowest 1 %", 0.99, 1.0))
_TTFT_PHASES = (Phase.QUEUE, Phase.PREFILL, Phase.OTHER)
_NO_STAMPS = "the target reports no time stamps"
_NO_TRANSFERS = "no KV moved between workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """A phase of one request. Seconds since the run began."""

    phase: Phase
    start_s: float
    end_s: float


def spans_of(request: RequestRecord) -> tuple[PhaseSpan, ...]:
    """Return the phases of a request in order, without gaps, from its sending to its end; empty ones are left out.

    Without time stamps of the server everything before the first token is `OTHER`.
    """
    server = request.server
    first_s = request.first_token_s if request.first_token_s is not None else request.end_s
    spans: list[PhaseSpan] = []
    at_s = request.sent_s
    for phase, length_s, limit_s in (
        (Phase.QUEUE, server.queue_s or 0.0, first_s),
        (Phase.PREFILL, server.prefill_s or 0.0, first_s),
        (Phase.OTHER, first_s - at_s, first_s),
        (Phase.TRANSFER, server.transfer_exposed_s or 0.0, request.end_s),
        (Phase.DECODE, request.end_s - at_s, request.end_s),
    ):
        end_s = min(at_s + max(0.0, length_s), limit_s)
        if end_s > at_s:
            spans.append(PhaseSpan(phase=phase, start_s=at_s, end_s=end_s))
            at_s = end_s
    return tuple(spans)


def lengths_of(request: RequestRecord) -> dict[Phase, float]:
    """Return the seconds that a request spent in each phase."""
    lengths = dict.fromkeys(Phase, 0.0)
    for span in spans_of(request):
        lengths[span.phase] += span.end_s - span.start_s
    return lengths


def hover_text(request: RequestRecord) -> str:
    """Return all details of a request, in lines for plotly."""
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
                ("exposed", server.transfer_exposed_s),
            )
            if value is not None
        ),
        " · ".join(
            f"{name} {duration(value)}"
            for name, value in (("TTFT", request.ttft_s), ("TPOT", request.tpot_s), ("E2E", request.e2e_s))
            if value is not None
        ),
        plain(" → ".join(worker for worker in (server.prefill_worker, server.decode_worker) if worker)),
        f"{scaled(server.transfer_bytes, 'B')} by {plain(server.transport or '?')}" if server.transfer_bytes else "",
        f"sent {duration(request.lag_s)} late" if request.lag_s > 0.001 else "",
        "" if request.is_complete else f"<b>{request.outcome}</b>: {plain(request.error[:160])}",
    ]
    return "<br>".join(line for line in lines if line)


def phases_figure(groups: Mapping[str, Sequence[RequestRecord]], phases: Sequence[Phase]) -> Any:
    """Return stacked bars of the mean time that each group of requests, none of them empty, spends in `phases`."""
    lengths = [[lengths_of(request) for request in group] for group in groups.values()]
    series = [
        Bars(
            name=phase.value,
            values=[float(np.mean([each[phase] for each in group])) for group in lengths],
            color=PHASE_COLORS[phase],
        )
        for phase in phases
    ]
    frame = Frame(y=Axis(title="mean time", unit=Unit.SECONDS, starts_at_zero=True), height=340)
    figure = bar_figure(list(groups), series, frame, mode="stack")
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def handoff_panels(columns: RequestColumns) -> tuple[Panel, ...]:
    """Return TTFT and total time by phase, and transfers by size."""
    return (_ttft_panel(columns), _whole_panel(columns), *_transfer_panels(columns))


def _ttft_panel(columns: RequestColumns) -> Panel:
    title = "TTFT by phase"
    rows = np.flatnonzero(columns.is_measured & ~np.isnan(columns.server("queue_s")))
    if not rows.size:
        return Panel(title=title, content=Absent(why=_NO_STAMPS), width=Width.HALF)
    order = rows[np.argsort(columns.ttft_s[rows], kind="stable")]
    groups = {
        name: [columns.requests[row] for row in order[round(low * order.size) : round(high * order.size)]]
        for name, low, high in _GROUPS
        if round(low * order.size) < round(high * order.size)
    }
    return Panel(
        title=title,
        look_for="The phase that grows from left to right is what makes first tokens slow.",
        content=phases_figure(groups, _TTFT_PHASES),
        width=Width.HALF,
        note=f"Means over {count(order.size, 'complete request')}, sorted by TTFT. The first token comes from the"
        " worker that computed the prompt, so it includes no transfer.",
    )


def _whole_panel(columns: RequestColumns) -> Panel:
    title = "Total time by phase"
    has = columns.is_measured & ~np.isnan(columns.server("queue_s"))
    if not has.any():
        return Panel(title=title, content=Absent(why=_NO_STAMPS), width=Width.HALF)
    groups = by_kind([columns.requests[row] for row in np.flatnonzero(has)])
    if len(columns.kinds) == 1:
        del groups[ALL]
    return Panel(
        title=title,
        look_for="The pink part is what the handoff costs users: the transfer that prefill did not hide.",
        content=phases_figure(groups, tuple(Phase)),
        width=Width.HALF,
        note="Means over complete requests, from sending to end.",
    )


def _transfer_panels(columns: RequestColumns) -> tuple[Panel, ...]:
    exposed_s, transfer_s = columns.server("transfer_exposed_s"), columns.server("transfer_s")
    num_bytes = columns.server("transfer_bytes")
    moved = columns.is_measured & (num_bytes > 0)
    if not moved.any():
        return (Panel(title="Transfers", content=Absent(why=_NO_TRANSFERS)),)
    seen = moved & ~np.isnan(exposed_s)
    panels = []
    if seen.any():
        hidden = 1 - exposed_s[seen].sum() / max(1e-12, transfer_s[seen].sum())
        panels.append(
            Panel(
                title="Exposed transfer by prompt length",
                look_for="Flat and low: blocks travel while the prompt is computed. Rising: they wait for its end.",
                content=_cloud(
                    columns,
                    seen,
                    (columns.num_prompt_tokens.astype(np.float64), exposed_s),
                    Frame(
                        x=Axis(title="prompt tokens", unit=Unit.TOKENS, scale=Scale.LOG),
                        y=Axis(title="after the end of prefill", unit=Unit.SECONDS),
                        height=340,
                    ),
                ),
                note=f"{count(int(seen.sum()), 'transfer')}; p50 {duration(float(np.median(exposed_s[seen])))};"
                f" {percent(max(0.0, hidden), 0)} of all transfer time is behind prefill.",
                width=Width.HALF,
            )
        )
    timed = moved & (transfer_s > 0)
    if timed.any():
        rate = num_bytes[timed] / transfer_s[timed]
        panels.append(
            Panel(
                title="Time and size of transfers",
                look_for="The slope is bandwidth; a flat bottom is the least cost of a handoff.",
                content=_cloud(
                    columns,
                    timed,
                    (num_bytes, transfer_s),
                    Frame(
                        x=Axis(title="bytes", unit=Unit.BYTES, scale=Scale.LOG),
                        y=Axis(title="first to last block", unit=Unit.SECONDS, scale=Scale.LOG),
                        height=340,
                    ),
                ),
                note=f"Median {Unit.BYTES.text(float(np.median(rate)))}/s from the first to the last block, waits for"
                " prefill included.",
                width=Width.HALF,
            )
        )
    return tuple(panels)


def _cloud(columns: RequestColumns, mask: Mask, values: tuple[Floats, Floats], frame: Frame) -> Any:
    """Return a scatter plot, coloured by transport."""
    figure = new_figure(frame)
    x, y = values
    transports = np.array([request.server.transport or "unknown" for request in columns.requests])
    for transport, color in colors_of(sorted(set(transports[mask].tolist()))).items():
        rows = np.flatnonzero(mask & (transports == transport))
        shown = rows[scatter_indices(y[rows], 1500)]
        figure.add_scatter(
            x=compact(x[shown]),
            y=compact(y[shown]),
            mode="markers",
            name=plain(transport),
            showlegend=True,
            marker=dots(color, int(mask.sum())),
            hovertemplate=f"{frame.x.unit.shows('x')}: {frame.y.unit.shows('y')}<extra>{plain(transport)}</extra>",
        )
    figure.update_xaxes(frame.x.ticks(x[mask]))
    figure.update_yaxes(frame.y.ticks(y[mask]))
    return figure

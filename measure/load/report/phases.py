"""Phases of a request: the server's durations, laid along the client's time stamps.

Only durations are taken from the server, whose clock is another one. They begin when the request was sent; the part of
TTFT that they do not cover (network, tokenizing, sampling) is `OTHER`. The exposed part of a transfer follows the first
token, which comes from the prefill worker; decode is the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from measure.load.records import RequestRecord
from measure.pages.axes import Axis, Unit
from measure.pages.figures import Bars, Frame, bar_figure, plain
from measure.pages.theme import PHASE_COLORS, Phase
from measure.pages.wording import duration, scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase of one request. Seconds since the run began."""

    phase: Phase
    start_s: float
    end_s: float


def spans_of(request: RequestRecord) -> tuple[Span, ...]:
    """Return the phases of a request in order, without gaps, from its sending to its end; empty ones are left out.

    Without time stamps of the server everything before the first token is `OTHER`.
    """
    server = request.server
    first_s = request.first_token_s if request.first_token_s is not None else request.end_s
    spans: list[Span] = []
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
            spans.append(Span(phase=phase, start_s=at_s, end_s=end_s))
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

"""Phases of requests, and panels on where their time goes and what the handoff and caches do to it.

Only durations are taken from the server, whose clock is another one. They are laid along the client's time stamps and
begin when the request was sent; the part of TTFT that they do not cover (network, tokenizing, sampling) is `OTHER`. The
exposed part of a transfer follows the first token, which comes from the prefill worker; decode is the rest.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from measure.figures import ALL, by_kind
from measure.load.records import RequestRecord
from measure.load.report.columns import Arm
from measure.load.report.latency import cloud_figure
from measure.pages.axes import Axis, Scale, Unit
from measure.pages.figures import Bars, Frame, bar_figure
from measure.pages.page import Absent, Panel, Width
from measure.pages.theme import PHASE_COLORS, Phase, colors_of
from measure.pages.wording import count, duration, percent, scaled

_GROUPS = (("fastest half", 0.0, 0.5), ("p50–90", 0.5, 0.9), ("p90–99", 0.9, 0.99), ("slowest 1 %", 0.99, 1.0))
_TTFT_PHASES = (Phase.QUEUE, Phase.PREFILL, Phase.OTHER)
_NO_STAMPS = Absent(why="no target reports its own time stamps")
_MAX_TURNS = 12


def lengths_of(request: RequestRecord) -> dict[Phase, float]:
    """Return the seconds that a request spent in each phase, from its sending to its end.

    Without time stamps of the server everything before the first token is `OTHER`.
    """
    server = request.server
    first_s = request.first_token_s if request.first_token_s is not None else request.end_s
    lengths = dict.fromkeys(Phase, 0.0)
    at_s = request.sent_s
    for phase, length_s, limit_s in (
        (Phase.QUEUE, server.queue_s or 0.0, first_s),
        (Phase.PREFILL, server.prefill_s or 0.0, first_s),
        (Phase.OTHER, math.inf, first_s),
        (Phase.TRANSFER, server.transfer_exposed_s or 0.0, request.end_s),
        (Phase.DECODE, math.inf, request.end_s),
    ):
        lengths[phase] = max(0.0, min(length_s, limit_s - at_s))
        at_s += lengths[phase]
    return lengths


def phase_panels(arms: Sequence[Arm]) -> Iterator[Panel]:
    """Yield the mean time in each phase, by run or by kind; of one run also TTFT by phase."""
    stamped = {arm.run.info.name: _stamped(arm) for arm in arms}
    groups: Mapping[str, Sequence[RequestRecord]] = {name: requests for name, requests in stamped.items() if requests}
    if len(arms) == 1 and groups:
        requests = next(iter(groups.values()))
        groups = by_kind(requests)
        if len(groups) == 2:
            del groups[ALL]
        yield _ttft_panel(requests)
    yield _bars(
        "Mean time in each phase",
        "Pink is what the handoff costs users: the transfer that prefill did not hide.",
        groups,
        tuple(Phase),
    )


def transfer_panel(arm: Arm) -> Panel:
    """Return the exposed part of transfers by prompt length."""
    columns = arm.columns
    exposed_s, transfer_s = columns.server("transfer_exposed_s"), columns.server("transfer_s")
    num_bytes = columns.server("transfer_bytes")
    moved = columns.is_counted & columns.is_complete & (num_bytes > 0) & ~np.isnan(exposed_s)
    title = "Exposed transfer by prompt length"
    if not moved.any():
        return Panel(title=title, content=Absent(why="no KV moved between workers"))
    transports = np.array([request.server.transport or "unknown" for request in columns.requests])
    hidden = 1 - exposed_s[moved].sum() / max(1e-12, transfer_s[moved].sum())
    rate = num_bytes[moved].sum() / max(1e-12, transfer_s[moved].sum())
    return Panel(
        title=title,
        look_for="Flat and low: blocks travel while the prompt is computed. Rising: they wait for its end.",
        content=cloud_figure(
            {name: np.flatnonzero(moved & (transports == name)) for name in sorted(set(transports[moved].tolist()))},
            (columns.num_prompt_tokens, exposed_s),
            Frame(
                x=Axis(title="prompt tokens", unit=Unit.TOKENS, scale=Scale.LOG),
                y=Axis(title="after the end of prefill", unit=Unit.SECONDS),
            ),
        ),
        note=f"{count(int(moved.sum()), 'transfer')}; p50 {duration(float(np.median(exposed_s[moved])))};"
        f" {percent(max(0.0, hidden), 0)} of all transfer time is behind prefill; {scaled(rate, 'B')}/s from the first"
        " to the last block, waits for prefill included.",
    )


def cache_panel(arm: Arm) -> Panel:
    """Return the cached share of prompts by turn."""
    columns = arm.columns
    cached = columns.server("num_cached_tokens")
    reported = columns.is_complete & ~np.isnan(cached)
    title = "Cache hits by turn"
    if not reported.any():
        return Panel(title=title, content=Absent(why="the target does not report cached tokens"))
    turns = np.minimum([request.turn for request in columns.requests], _MAX_TURNS - 1)
    present = sorted(set(turns[reported].tolist()))
    series = []
    for kind, color in colors_of(columns.kinds).items():
        rows = [reported & columns.of_kind(kind) & (turns == turn) for turn in present]
        shares = [cached[own].sum() / max(1.0, columns.num_prompt_tokens[own].sum()) for own in rows]
        series.append(Bars(name=kind, values=shares, color=color))
    names = [f"{turn + 1}{' and later' if turn == _MAX_TURNS - 1 else ''}" for turn in present]
    frame = Frame(x=Axis(title="turn of the session"), y=Axis(title="of prompt tokens", unit=Unit.SHARE), height=320)
    return Panel(
        title=title,
        look_for="From the second turn on, the session's history should be cached; the rest was evicted.",
        content=bar_figure(names, series, frame).update_yaxes(range=[0, 1.0]),
    )


def _stamped(arm: Arm) -> list[RequestRecord]:
    """Return the counted complete requests whose server reports its time stamps."""
    columns = arm.columns
    has = columns.is_counted & columns.is_complete & ~np.isnan(columns.server("queue_s"))
    return [columns.requests[row] for row in np.flatnonzero(has)]


def _ttft_panel(requests: Sequence[RequestRecord]) -> Panel:
    ordered = sorted(requests, key=lambda request: request.ttft_s or 0.0)
    groups = {name: ordered[round(low * len(ordered)) : round(high * len(ordered))] for name, low, high in _GROUPS}
    return _bars(
        "TTFT by phase",
        "The phase that grows from left to right is what makes first tokens slow.",
        {name: group for name, group in groups.items() if group},
        _TTFT_PHASES,
    )


def _bars(title: str, look_for: str, groups: Mapping[str, Sequence[RequestRecord]], phases: Sequence[Phase]) -> Panel:
    """Return stacked bars of the mean time that each group of requests spends in `phases`."""
    if not groups:
        return Panel(title=title, content=_NO_STAMPS)
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
    return Panel(
        title=title,
        look_for=look_for,
        content=figure.update_layout(legend={"traceorder": "normal"}),
        note="Means over complete requests, from sending on.",
        width=Width.HALF,
    )

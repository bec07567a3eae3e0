"""Sessions on an experiment's page: interactivity against throughput, and how many sessions went well."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from measure.experiment.points import LoadUnit, Point, Source, most_good_sessions, num_good_sessions
from measure.load.session_figures import SessionFigures
from measure.load.tables import or_unknown
from measure.pages.axes import Axis, Scale, Unit
from measure.pages.figures import Curve, Frame, compact, line_figure
from measure.pages.page import Panel, Table, Width, table_of
from measure.pages.theme import LIMIT, colors_of, dash_of, symbol_of
from measure.pages.wording import duration, number, percent

_Value = Callable[[Point], float | None]
_MAX_SHOWN = 10
"""Number of curves that can be told apart."""
_MAX_LABELLED = 3
"""Number of curves whose points have labels that do not lie on others."""
_MANY_LOST = 0.1
"""Share of lost sessions above which a point is marked; of requests it is what InferenceX takes at most."""


def sessions_of(point: Point) -> SessionFigures:
    """Return the figures of a point's sessions, which it has."""
    assert point.sessions is not None, "it is of sessions"
    return point.sessions


def session_table(points: Sequence[Point]) -> Table:
    """Return a row for each point of sessions; the most good sessions of each load are strong."""
    ordered = sorted(points, key=lambda point: (point.load, point.arm.name))
    best = {load: max(map(num_good_sessions, own)) for load, own in groupby(ordered, _load)}
    columns: dict[str, Callable[[Point], str]] = {
        "arm": lambda point: point.arm.name,
        "load": lambda point: point.load_text,
        "sessions": lambda point: f"{sessions_of(point).num_complete} of {sessions_of(point).num_sessions}",
        "good": lambda point: or_unknown(sessions_of(point).num_good, str),
        "good/h": lambda point: or_unknown(sessions_of(point).good_per_hour, number),
        "stretch p50": lambda point: _stretch(point, "p50"),
        "p90": lambda point: _stretch(point, "p90"),
        "waiting p50": lambda point: _waiting(point, "p50"),
        "p90 ": lambda point: _waiting(point, "p90"),
        "tokens/s p50": lambda point: or_unknown(sessions_of(point).interactivity_p50, number),
        "P90": lambda point: or_unknown(sessions_of(point).interactivity_p90, number),
        "tokens/s/worker": lambda point: number(point.tokens_per_s_per_worker),
        "TTFT p50": lambda point: "–" if point.overall.ttft is None else duration(point.overall.ttft.p50),
        "p90  ": lambda point: "–" if point.overall.ttft is None else duration(point.overall.ttft.p90),
        "TPOT p50": lambda point: "–" if point.overall.tpot is None else duration(point.overall.tpot.p50),
        "hits": lambda point: or_unknown(point.token_hit, percent),
    }
    strong = frozenset(row for row, each in enumerate(ordered) if num_good_sessions(each) == best[each.load])
    return table_of(ordered, columns, text_columns=frozenset(["load"]), strong_rows=strong)


def session_panels(points: Sequence[Point]) -> tuple[Panel, ...]:
    """Return the curve of interactivity and throughput of all arms, their good sessions by load, and a table."""
    limit = sessions_of(points[0]).stretch_limit
    loads = [point.load for point in points]
    scale = Scale.LOG if min(loads) * 8 < max(loads) else Scale.LINEAR
    load = Axis(title=f"load, {points[0].load_unit}", scale=scale)
    hidden = len({(point.arm.name, point.source) for point in points}) - _MAX_SHOWN
    panels = [
        Panel(
            title="Interactivity and throughput",
            look_for="Further up and to the right is better: more work of each worker, and faster answers.",
            content=_interactivity_figure(points),
            note=f"Labels: {points[0].load_unit}. Interactivity is a session's output tokens by the end-to-end times of"
            " its requests, of sessions that came to their ends."
            + (f" The legend has {hidden} more arms; click on one to see it." if hidden > 0 else ""),
        )
    ]
    for title, look_for, unit, value in (
        (
            "Good sessions per hour",
            f"complete within {limit:g} times an idle server's waiting",
            Unit.PLAIN,
            _good_per_hour,
        ),
        ("Sessions that were lost", "a request was refused or failed", Unit.SHARE, _lost_share),
        ("Stretch, 90th percentile", "of complete sessions", Unit.PLAIN, partial(_p90, "stretch")),
        ("Waiting, 90th percentile", "of complete sessions", Unit.SECONDS, partial(_p90, "waiting")),
    ):
        frame = Frame(x=load, y=Axis(unit=unit, starts_at_zero=True), height=340)
        figure = line_figure(_curves(points, lambda point: point.load, value), frame)
        figure.update_layout(showlegend=False, margin={"t": 10})
        panels.append(Panel(title=title, look_for=f"{look_for}; colours as above", content=figure, width=Width.HALF))
    table = Panel(
        title="Sessions",
        content=session_table(points),
        note="Waiting: time that is not a tool's or a person's, on the longest path. Stretch: waiting by that of an"
        " idle server. Bold: the most good sessions of a load.",
    )
    return (*panels, table)


def verdict_of(points: Sequence[Point]) -> tuple[str, ...]:
    """Return which arm served most sessions well, by load."""
    ordered = sorted((point for point in points if point.load_unit is not LoadUnit.REQUESTS), key=_load)
    found = []
    for _, group in groupby(ordered, _load):
        own = list(group)
        best = max(own, key=lambda point: (num_good_sessions(point), -(_p90("stretch", point) or 0.0)))
        if sessions_of(best).num_good is None:
            continue
        alike = sum(num_good_sessions(point) == num_good_sessions(best) for point in own) - 1
        others = "" if not alike else ", as does one other" if alike == 1 else f", as do {alike} others"
        figures = sessions_of(best)
        found.append(
            f"At {best.load_text}, {best.arm.name} serves {figures.num_good} of {figures.num_sessions} well{others}."
        )
    return tuple(found)


def _load(point: Point) -> float:
    return point.load


def _interactivity_figure(points: Sequence[Point]) -> Any:
    frame = Frame(
        x=Axis(title="interactivity: output tokens/s that 90 % of the complete sessions reach", starts_at_zero=True),
        y=Axis(title="output tokens/s and worker", starts_at_zero=True),
        height=640,
    )
    work = attrgetter("tokens_per_s_per_worker")
    figure = line_figure(_curves(points, _interactivity, work, are_labelled=True), frame)
    shown = most_good_sessions(points)[:_MAX_SHOWN]
    known = [p for p in points if (p.arm.name, p.source) in shown and _interactivity(p) is not None]
    lost = [point for point in known if _lost_share(point) > _MANY_LOST]
    if lost:
        figure.add_scatter(
            x=compact([_interactivity(point) or 0.0 for point in lost]),
            y=compact([work(point) for point in lost]),
            name=f"more than {percent(_MANY_LOST, 0)} of the sessions lost",
            mode="markers",
            marker={"symbol": "circle-open", "size": 17, "color": LIMIT, "line": {"width": 2}},
            hoverinfo="skip",
        )
    return figure


def _curves(points: Sequence[Point], x: _Value, y: _Value, *, are_labelled: bool = False) -> list[Curve]:
    """Return a curve for each arm, most good sessions first; only the legend has those after `_MAX_SHOWN`."""
    names = most_good_sessions(points)
    colors = colors_of(f"{name} {source}" for name, source in names)
    curves = []
    for index, (name, source) in enumerate(names):
        own = sorted((p for p in points if (p.arm.name, p.source) == (name, source)), key=_load)
        known = [(at, to, point) for point in own if (at := x(point)) is not None and (to := y(point)) is not None]
        curves.append(
            Curve(
                name=name + (f", {source}" if len({source for _, source in names}) > 1 else ""),
                x=[at for at, _, _ in known],
                y=[to for _, to, _ in known],
                color=colors[f"{name} {source}"],
                dash=dash_of(index),
                symbol=symbol_of(index) + ("-open" if source is Source.SIMULATED else ""),
                texts=[_load_and_losses(point) for _, _, point in known],
                labels=[f"{point.load:g}" for _, _, point in known] if are_labelled and index < _MAX_LABELLED else (),
                is_hidden=index >= _MAX_SHOWN,
            )
        )
    return curves


def _interactivity(point: Point) -> float | None:
    return sessions_of(point).interactivity_p90


def _load_and_losses(point: Point) -> str:
    figures = sessions_of(point)
    return f"{point.load_text}: {figures.num_complete} of {figures.num_sessions} complete"


def _good_per_hour(point: Point) -> float | None:
    return sessions_of(point).good_per_hour


def _lost_share(point: Point) -> float:
    return sessions_of(point).lost_share


def _p90(name: str, point: Point) -> float | None:
    return _percentile(getattr(sessions_of(point), name), "p90")


def _percentile(found: object, name: str) -> float | None:
    return None if found is None else float(getattr(found, name))


def _stretch(point: Point, name: str) -> str:
    return or_unknown(_percentile(sessions_of(point).stretch, name), number)


def _waiting(point: Point, name: str) -> str:
    return or_unknown(_percentile(sessions_of(point).waiting, name), duration)

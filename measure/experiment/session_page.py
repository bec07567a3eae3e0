"""Sessions on an experiment's page: interactivity against throughput, and how many sessions went well."""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from measure.experiment.points import LoadUnit, Point, Source
from measure.load.session_figures import SessionFigures
from measure.load.tables import or_unknown
from measure.pages.axes import Axis, Scale, Unit
from measure.pages.figures import Curve, Frame, line_figure
from measure.pages.page import Panel, Table, Width, table_of
from measure.pages.theme import colors_of, dash_of, symbol_of
from measure.pages.wording import duration, number, percent

_Value = Callable[[Point], float | None]


def sessions_of(point: Point) -> SessionFigures:
    """Return the figures of a point's sessions, which it has."""
    assert point.sessions is not None, "it is of sessions"
    return point.sessions


def load_text(point: Point) -> str:
    """Return a point's load with its unit."""
    return f"{point.load:g} {point.load_unit}"


def session_table(points: Sequence[Point]) -> Table:
    """Return a row for each point of sessions; the most good sessions of each load are strong."""
    ordered = sorted(points, key=lambda point: (point.load, point.arm.name))
    best = {load: max(map(_num_good, own)) for load, own in groupby(ordered, _load)}
    columns: dict[str, Callable[[Point], str]] = {
        "arm": lambda point: point.arm.name,
        "load": load_text,
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
    strong = frozenset(row for row, each in enumerate(ordered) if _num_good(each) == best[each.load])
    return table_of(ordered, columns, text_columns=frozenset(["load"]), strong_rows=strong)


def session_panels(points: Sequence[Point]) -> tuple[Panel, ...]:
    """Return the curve of interactivity and throughput of all arms, their good sessions by load, and a table."""
    limit = sessions_of(points[0]).stretch_limit
    speed = Axis(title="output tokens per second that 90 % of the sessions reach", starts_at_zero=True)
    work = Axis(title="output tokens per second and worker", starts_at_zero=True)
    loads = [point.load for point in points]
    scale = Scale.LOG if min(loads) * 8 < max(loads) else Scale.LINEAR
    load = Axis(title=f"load, {points[0].load_unit}", scale=scale)
    curve = line_figure(
        _curves(points, _interactivity, attrgetter("tokens_per_s_per_worker")),
        Frame(x=speed, y=work, height=520),
    )
    panels = [
        Panel(
            title="Interactivity and throughput",
            look_for="Further up and to the right is better: more work of each worker, and faster answers.",
            content=curve,
            note="A point is a load. Interactivity is a session's output tokens by the end-to-end times of its"
            " requests; sessions that are not complete count with what they had.",
        )
    ]
    for title, unit, value in (
        (f"Good sessions: complete within {limit:g} times the idle server's waiting", Unit.PLAIN, _good_per_hour),
        ("Stretch, 90th percentile", Unit.PLAIN, lambda point: _percentile(sessions_of(point).stretch, "p90")),
        ("Waiting, 90th percentile", Unit.SECONDS, lambda point: _percentile(sessions_of(point).waiting, "p90")),
        ("Sessions that were not complete", Unit.SHARE, _lost_share),
    ):
        suffix = " per hour" if value is _good_per_hour else ""
        frame = Frame(
            x=load, y=Axis(title=title + suffix if suffix else "", unit=unit, starts_at_zero=True), height=340
        )
        figure = line_figure(_curves(points, lambda point: point.load, value), frame)
        panels.append(Panel(title=title + suffix, content=figure, width=Width.HALF))
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
        best = max(own, key=_num_good)
        if sessions_of(best).num_good is None:
            continue
        alike = sum(_num_good(point) == _num_good(best) for point in own) - 1
        others = f", as do {alike} others" if alike else ""
        figures = sessions_of(best)
        found.append(
            f"At {load_text(best)}, {best.arm.name} serves {figures.num_good} of {figures.num_sessions} well{others}."
        )
    return tuple(found)


def _load(point: Point) -> float:
    return point.load


def _curves(points: Sequence[Point], x: _Value, y: _Value) -> list[Curve]:
    names = list(dict.fromkeys((point.arm.name, point.source) for point in points))
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
                texts=[load_text(point) for _, _, point in known],
            )
        )
    return curves


def _interactivity(point: Point) -> float | None:
    return sessions_of(point).interactivity_p90


def _num_good(point: Point) -> int:
    return sessions_of(point).num_good or 0


def _good_per_hour(point: Point) -> float | None:
    return sessions_of(point).good_per_hour


def _lost_share(point: Point) -> float:
    figures = sessions_of(point)
    return 1 - figures.num_complete / figures.num_sessions


def _percentile(found: object, name: str) -> float | None:
    return None if found is None else float(getattr(found, name))


def _stretch(point: Point, name: str) -> str:
    return or_unknown(_percentile(sessions_of(point).stretch, name), number)


def _waiting(point: Point, name: str) -> str:
    return or_unknown(_percentile(sessions_of(point).waiting, name), duration)

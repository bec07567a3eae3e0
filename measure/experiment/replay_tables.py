"""The tables of a replay: what became of the requests under each policy, and the routers' forecasts."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.table import Table as TerminalTable

from measure.experiment.points import Point
from measure.experiment.store import Store
from measure.experiment.tables import forecast_columns
from measure.figures import Percentiles
from measure.load.tables import or_unknown, terminal_table
from measure.pages.page import table_of
from measure.simulate.bound import Bound

FORECASTS_NOTE = (
    "off: median relative error of the routers' forecasts; held: outcomes within their intervals, which should be 80 %"
)
Labels = Mapping[float, str]
"""A load in words."""


def replay_table(
    points: Sequence[Point], store: Store, *, labels: Labels, bounds: Mapping[float, Bound]
) -> TerminalTable:
    """Return a row for each point, by speed; the best goodput of each speed is bold. `bounds`: by load, or none."""
    best: Counter[float] = Counter()
    for point in points:
        best[point.load] = max(best[point.load], point.overall.num_good)
    columns = {
        **_names(labels),
        "goodput/s": lambda point: f"{point.overall.good_share * point.load:.2f}",
        "good %": lambda point: _percent(point.overall.good_share),
        "refused %": lambda point: _percent(point.overall.num_not_complete / point.overall.num_requests),
        "TTFT p50/p90/p99 s": lambda point: _times(point.overall.ttft, "{0.p50:.2f}/{0.p90:.2f}/{0.p99:.2f}"),
        "TPOT p50/p99 ms": lambda point: _times(point.overall.tpot, "{0.p50:.0f}/{0.p99:.0f}", factor=1000),
        "E2E p50/p99 s": lambda point: _times(point.overall.e2e, "{0.p50:.1f}/{0.p99:.1f}"),
        "hit %": lambda point: or_unknown(point.token_hit, _percent),
        "pulled %": lambda point: or_unknown(point.pulled_share, _percent),
        "hot spot": lambda point: or_unknown(point.hot_spot, "{:.2f}".format),
        "moved GB": lambda point: f"{point.transfer_bytes / 1e9:.0f}",
        "busy P/D %": lambda point: "/".join(
            or_unknown(busy, _whole) for busy in (point.prefill_busy, point.decode_busy)
        ),
        "choice µs": lambda point: f"{store.choice_p50_us(point):.0f}",
    }
    if bounds:
        columns |= {
            "bound %": lambda point: _percent(bounds[point.load].good_share),
            "of bound %": lambda point: _percent(bounds[point.load].ratio(point.overall.num_good)),
        }
    return _table(points, columns, is_strong=lambda point: point.overall.num_good == best[point.load])


def forecast_table(points: Sequence[Point], labels: Labels) -> TerminalTable | None:
    """Return a row for each point whose routers forecast, by speed; None without any."""
    columns = forecast_columns(points)
    return _table([point for point in points if point.forecasts], _names(labels) | columns) if columns else None


def _names(labels: Labels) -> dict[str, Callable[[Point], str]]:
    return {"load": lambda point: labels[point.load], "policy": lambda point: point.arm.name}


def _table(
    points: Iterable[Point],
    columns: Mapping[str, Callable[[Point], str]],
    *,
    is_strong: Callable[[Point], bool] = lambda _: False,
) -> TerminalTable:
    ordered = sorted(points, key=lambda point: point.load)
    strong = frozenset(row for row, point in enumerate(ordered) if is_strong(point))
    return terminal_table(table_of(ordered, columns, text_columns=frozenset(["policy"]), strong_rows=strong))


def _times(latency: Percentiles | None, form: str, *, factor: float = 1) -> str:
    if latency is None:
        return "-"
    return form.format(Percentiles(p50=factor * latency.p50, p90=factor * latency.p90, p99=factor * latency.p99))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _whole(share: float) -> str:
    return f"{100 * share:.0f}"

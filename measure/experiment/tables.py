"""Tables of an experiment for a terminal."""

import statistics
from collections.abc import Iterable, Sequence
from operator import attrgetter

from rich.table import Table

from measure.experiment.capacity import ArmCapacity
from measure.experiment.curves import curves_of
from measure.experiment.points import Point, Source
from measure.figures import Percentiles

_LEFT = ("arm", "")
_NONE = "–"


def points_table(points: Iterable[Point]) -> Table:
    """Return a row for each arm and load: means of the repeats, and medians of percentiles with their range."""
    curves = curves_of(points)
    has_simulated = any(curve.source is Source.SIMULATED for curve in curves)
    table = _table(
        "arm",
        "load /s",
        "runs",
        "good",
        "good /s",
        "per worker",
        "TTFT p50",
        "p99 s",
        "ITL p50",
        "p99 ms",
        "prefill busy",
        "decode busy",
    )
    for curve, reading in ((each, reading) for each in curves for reading in each.readings):
        is_marked = has_simulated and curve.source is Source.SIMULATED
        table.add_row(
            f"{curve.arm.name} (simulated)" if is_marked else curve.arm.name,
            f"{reading.load:g}",
            str(len(reading.points)),
            f"{reading.share_of(lambda figures: figures.num_good):.1%}" if reading.num_requests else _NONE,
            f"{reading.mean_of(lambda point: point.goodput_per_s):.2f}",
            f"{reading.mean_of(lambda point: point.goodput_per_worker):.2f}",
            *_latencies([point.overall.ttft for point in reading.points], "{:.2f}", 1),
            *_latencies([point.overall.itl for point in reading.points], "{:.0f}", 1000),
            _share(reading.mean_of(lambda point: point.prefill_busy)),
            _share(reading.mean_of(lambda point: point.decode_busy)),
        )
    return table


def capacity_table(capacities: Iterable[ArmCapacity]) -> Table:
    """Return a row for each capacity."""
    table = _table("arm", "", "serves /s", "95 %", "good /s", "per worker", "loads tried")
    for capacity in capacities:
        high = "?" if capacity.high is None else f"{capacity.high:.3g}"
        table.add_row(
            capacity.arm.name,
            capacity.source.value,
            f"{capacity.load:.3g}",
            f"{capacity.low:.3g} – {high}",
            f"{capacity.goodput_per_s:.2f}",
            f"{capacity.goodput_per_worker:.2f}",
            str(len(capacity.probes)),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right")
    return table


def _latencies(latencies: Sequence[Percentiles | None], form: str, factor: float) -> tuple[str, str]:
    known = [latency for latency in latencies if latency is not None]
    picks = attrgetter("p50"), attrgetter("p99")
    p50, p99 = (_range([factor * pick(latency) for latency in known], form) for pick in picks)
    return p50, p99


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return _NONE
    low, middle, high = (form.format(each) for each in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0%}"

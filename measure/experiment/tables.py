"""An experiment's points as a table for a terminal."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from measure.experiment.capacity import Capacity
from measure.experiment.points import Point, Source
from measure.figures import Percentiles

_LEFT = ("arm", "")


def points_table(points: Iterable[Point]) -> Table:
    """Return a row for each arm and load: the means of its repeats, of percentiles with their range."""
    groups: dict[tuple[Source, str, float], list[Point]] = {}
    for point in points:
        groups.setdefault((point.source, point.arm.name, point.load), []).append(point)
    has_simulated = any(source is Source.SIMULATED for source, _, _ in groups)
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
    for (source, name, load), group in groups.items():
        arm = f"{name} (simulated)" if has_simulated and source is Source.SIMULATED else name
        num_requests = sum(point.overall.num_requests for point in group)
        num_good = sum(point.overall.num_good for point in group)
        table.add_row(
            arm,
            f"{load:g}",
            str(len(group)),
            f"{num_good / num_requests:.1%}" if num_requests else "–",
            f"{statistics.fmean(point.goodput_per_s for point in group):.2f}",
            f"{statistics.fmean(point.goodput_per_worker for point in group):.2f}",
            *_latencies([point.overall.ttft for point in group], "{:.2f}", 1),
            *_latencies([point.overall.itl for point in group], "{:.0f}", 1000),
            _share([point.prefill_busy for point in group]),
            _share([point.decode_busy for point in group]),
        )
    return table


def capacity_table(capacities: Iterable[Capacity]) -> Table:
    """Return a row for each arm."""
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
    picks: tuple[Callable[[Percentiles], float], ...] = (lambda latency: latency.p50, lambda latency: latency.p99)
    p50, p99 = (_range([factor * pick(latency) for latency in known], form) for pick in picks)
    return p50, p99


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    low, middle, high = (form.format(each) for each in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def _share(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.0%}" if known else "–"

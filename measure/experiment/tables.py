"""Tables of an experiment: of each arm and of each load for a terminal; of each arm and of each run for its page."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from urllib.parse import quote

from rich.table import Table as TerminalTable

from measure.experiment.analysis import ArmFinding, Findings, Gain
from measure.experiment.capacity import Capacity
from measure.experiment.curves import Reading
from measure.experiment.points import PaidWorkers, Point
from measure.experiment.store import Store
from measure.figures import ALL, Percentiles
from measure.load.estimates import Estimate
from measure.load.tables import UNKNOWN, filled_table, or_unknown, whole_percent
from measure.pages.page import Panel, table_of
from measure.pages.wording import change, duration, number, percent, rate


def loads_table(findings: Findings) -> TerminalTable:
    """Return a row for each arm and load: means of the repeats, percentiles with their range."""
    columns: dict[str, Callable[[Reading], str]] = {
        f"{findings.source} arm": lambda reading: reading.points[0].arm.name,
        "load": lambda reading: reading.points[0].load_text,
        "runs": lambda reading: str(len(reading.points)),
        "good": lambda reading: f"{reading.good_share.value:.1%}",
        "good /s": lambda reading: f"{reading.mean_of(attrgetter('goodput_per_s')):.2f}",
        "per worker": lambda reading: f"{reading.mean_of(attrgetter('goodput_per_worker')):.2f}",
        "TTFT p50": lambda reading: _range(reading.latency(ALL, "ttft", "p50"), "{:.2f}"),
        "p99 s": lambda reading: _range(reading.latency(ALL, "ttft", "p99"), "{:.2f}"),
        "ITL p50": lambda reading: _range(reading.latency(ALL, "itl", "p50"), "{:.0f}", factor=1000),
        "p99 ms": lambda reading: _range(reading.latency(ALL, "itl", "p99"), "{:.0f}", factor=1000),
        "prefill busy": lambda reading: or_unknown(reading.mean_of(attrgetter("prefill_busy")), "{:.0%}".format),
        "decode busy": lambda reading: or_unknown(reading.mean_of(attrgetter("decode_busy")), "{:.0%}".format),
        "worst part": lambda reading: or_unknown(reading.mean_of(attrgetter("worst_share")), "{:.1%}".format),
        "worker hours": lambda reading: or_unknown(reading.mean_of(_paid_h), "{:.2f}".format),
    }
    return filled_table((reading for arm in findings.arms for reading in arm.curve.readings), columns)


def arms_table(findings: Findings) -> TerminalTable:
    """Return a row for each arm."""
    return filled_table(findings.arms, _arm_columns(findings))


def arms_panel(findings: Findings) -> Panel:
    """Return the same table for a page."""
    best = findings.best_splits
    return Panel(
        title=f"Arms, {findings.source}",
        content=table_of(
            findings.arms,
            _arm_columns(findings),
            text_columns=frozenset(["gives way first"]),
            strong_rows=frozenset(index for index, arm in enumerate(findings.arms) if arm in best),
        ),
        note="Bold: the best split of its size. Gain: of a split over the best aggregated arm with equal resources.",
    )


def runs_panel(findings: Iterable[Findings], store: Store) -> Panel:
    """Return a row for each run, which links to the run's own page if the store has one."""
    points = [point for each in findings for point in each.points]
    columns: dict[str, Callable[[Point], str]] = {
        "arm": lambda point: point.arm.name,
        "source": lambda point: point.source.value,
        "load": lambda point: point.load_text,
        "run": lambda point: str(point.repeat + 1),
        "requests": lambda point: f"{point.overall.num_requests:,}",
        "good": lambda point: percent(point.overall.good_share),
        "good /s": lambda point: number(point.goodput_per_s),
        "late": lambda point: str(point.overall.num_ttft_misses),
        "slow": lambda point: str(point.overall.num_tpot_misses),
        "refused": lambda point: str(point.overall.num_not_complete),
        "TTFT p50": lambda point: _time(point.overall.ttft, "p50"),
        "p99": lambda point: _time(point.overall.ttft, "p99"),
        "gap p50": lambda point: _time(point.overall.itl, "p50"),
        "p99 ": lambda point: _time(point.overall.itl, "p99"),
        "prefill busy": lambda point: or_unknown(point.prefill_busy, whole_percent),
        "decode busy": lambda point: or_unknown(point.decode_busy, whole_percent),
        "KV peak": lambda point: or_unknown(point.kv_peak, whole_percent),
        "cached": lambda point: or_unknown(point.token_hit, whole_percent),
        "pulled": lambda point: or_unknown(point.pulled_share, whole_percent),
        "hot spot": lambda point: or_unknown(point.hot_spot, "{:.2f}".format),
        "worst part": lambda point: or_unknown(point.worst_share, percent),
        "worker hours": lambda point: or_unknown(_paid_h(point), "{:.2f}".format),
        "changes": _changes_text,
    } | forecast_columns(points)
    text = frozenset(["source", "changes"])
    links = tuple(_link(point, store) for point in points)
    return Panel(
        title="Runs",
        content=table_of(points, columns, text_columns=text, links=links if any(links) else ()),
        note="Arms link to the pages of their runs, if there are any.",
    )


def forecast_columns(points: Iterable[Point]) -> dict[str, Callable[[Point], str]]:
    """Return the columns of the routers' forecasts, beside what came of them; none where no router forecast."""
    names = dict.fromkeys(name for point in points for name in point.forecasts)
    return {f"{name}: off, held %": partial(_forecast_text, name) for name in names}


def _forecast_text(name: str, point: Point) -> str:
    check = point.forecasts.get(name)
    if check is None:
        return UNKNOWN
    return f"{100 * check.median_error:.0f}, {or_unknown(check.held_share, lambda share: f'{100 * share:.0f}')}"


def gain_text(gain: Gain | None) -> str:
    """Return a gain with its interval, or its verdict alone where the interval is not known."""
    if gain is None:
        return UNKNOWN
    if gain.ratio is None:
        return gain.verdict.value
    value, low, high = (change(each) for each in (gain.ratio.value, gain.ratio.low, gain.ratio.high))
    return f"{value} (95 %: {low} to {high})"


def _arm_columns(findings: Findings) -> Mapping[str, Callable[[ArmFinding], str]]:
    return {
        "arm": lambda arm: arm.arm.name,
        "serves": lambda arm: _served(arm.capacity),
        "95 %": lambda arm: (
            f"{number(arm.capacity.low)} to {'more' if arm.capacity.high is None else number(arm.capacity.high)}"
        ),
        f"per {findings.unit}": lambda arm: rate(arm.per_unit) if arm.capacity.is_bracketed else UNKNOWN,
        "most goodput": lambda arm: f"{rate(arm.curve.peak.goodput.value)} at {rate(arm.curve.peak.load)}",
        "gain": lambda arm: gain_text(findings.gain_of(arm)),
        "gives way first": lambda arm: arm.limit.limit.value,
    }


def _paid_h(point: Point) -> float | None:
    return None if point.paid is None else point.paid.worker_s / 3600


def _changes_text(point: Point) -> str:
    paid = point.paid or PaidWorkers(worker_s=0.0)
    counts = {"started": paid.num_starts, "flipped": paid.num_flips, "left": paid.num_leaves, "moved": paid.num_moves}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _range(estimate: Estimate | None, form: str, *, factor: float = 1) -> str:
    """Return a mean over the runs, with the smallest and the largest value where they differ."""
    if estimate is None:
        return UNKNOWN
    low, mean, high = (form.format(factor * each) for each in (estimate.low, estimate.value, estimate.high))
    return mean if low == high else f"{mean} ({low}–{high})"


def _served(capacity: Capacity) -> str:
    return f"> {rate(capacity.highest)}" if math.isinf(capacity.load) else rate(capacity.load)


def _time(latency: Percentiles | None, percentile: str) -> str:
    return UNKNOWN if latency is None else duration(getattr(latency, percentile))


def _link(point: Point, store: Store) -> str:
    """Return the link from the experiment's page to a run's own page; empty without one."""
    page = store.folder(point.source, point.cell) / "report.html"
    return quote(os.path.relpath(page, store.out)) if page.exists() else ""

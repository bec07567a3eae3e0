"""The results: medians over repeats, for people and as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.side_by_side.measure import Cell
from measure.load.estimates import Distribution
from measure.load.summary import KindSummary, Summary

_SHOWN = {
    "TTFT p50": "ttft_p50_s",
    "TTFT p99": "ttft_p99_s",
    "ITL p99": "itl_p99_s",
    "TPOT p50": "tpot_p50_s",
    "TPOT p99": "tpot_p99_s",
}


def rows(measured: Mapping[Cell, Summary]) -> list[dict[str, Any]]:
    """Return one row for each load, kind of request and arm: medians and ranges over the repeats."""
    groups: dict[tuple[float, str, str], list[tuple[Summary, KindSummary]]] = {}
    for cell, summary in measured.items():
        for kind in summary.kinds:
            groups.setdefault((cell.load, kind.kind, cell.arm), []).append((summary, kind))
    return [
        {
            "load": load,
            "kind": kind,
            "arm": arm,
            "requests": sum(found.num_requests for _, found in group),
            "not_complete": sum(found.num_not_complete for _, found in group),
            "good_share": _spread([found.good_share.value for _, found in group]),
            "goodput_per_s": _spread([found.goodput_per_s.value for _, found in group]),
            "cache_hit": _spread([found.cache.hit_share.value if found.cache else None for _, found in group]),
            "output_tokens_per_s": _spread([summary.throughput.output_tokens_per_s for summary, _ in group]),
            **{
                f"{measure}_p{round(share * 100)}_s": _spread(
                    [_percentile(getattr(found.latencies, measure), share) for _, found in group]
                )
                for measure in ("ttft", "itl", "tpot", "e2e")
                for share in (0.5, 0.9, 0.99)
            },
        }
        for (load, kind, arm), group in sorted(groups.items(), key=lambda item: item[0][:2])
    ]


def _percentile(distribution: Distribution | None, share: float) -> float | None:
    return None if distribution is None else distribution.at(share).value


def _spread(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Return (median, least, greatest); None when nothing was measured."""
    known = [value for value in values if value is not None]
    return (statistics.median(known), min(known), max(known)) if known else None


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the results for people."""
    shown = Table(title="Milliseconds; medians over the repeats (range)")
    shown.add_column("load")
    shown.add_column("kind")
    shown.add_column("arm", no_wrap=True)
    for name in ("requests", "good", *_SHOWN, "cached"):
        shown.add_column(name, justify="right")
    for row in found:
        failed = f" ({row['not_complete']} failed)" if row["not_complete"] else ""
        shown.add_row(
            f"{row['load']:g}/s",
            row["kind"],
            row["arm"],
            f"{row['requests']}{failed}",
            _cell(row["good_share"], scale=100, unit=" %"),
            *(_cell(row[key], scale=1000) for key in _SHOWN.values()),
            _cell(row["cache_hit"], scale=100, unit=" %"),
        )
    return shown


def _cell(spread: tuple[float, float, float] | None, *, scale: float, unit: str = "") -> str:
    if spread is None:
        return "–"
    middle, low, high = (f"{value * scale:.0f}" for value in spread)
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low}–{high})"

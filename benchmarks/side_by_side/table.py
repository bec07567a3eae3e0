"""Figures of the runs: a value of each repeat for every load, kind of request and arm."""

from collections.abc import Mapping

from benchmarks.figures import Figures
from benchmarks.side_by_side.measure import Cell
from measure.load.summary import KindSummary, Summary

_LATENCIES = ("ttft", "itl", "tpot", "e2e")


def figures_of(measured: Mapping[Cell, Summary]) -> Figures:
    """Return the figures; what a repeat did not measure is left out."""
    figures = Figures()
    for cell, summary in sorted(measured.items(), key=lambda item: item[0].load):
        for kind in summary.kinds:
            values = _values(summary, kind)
            known = {name: value for name, value in values.items() if value is not None}
            figures.add(f"{cell.load:g} requests/s", kind.kind, cell.arm, **known)
    return figures


def _values(summary: Summary, kind: KindSummary) -> dict[str, float | None]:
    latencies_ms = {
        f"{name.upper()}_p{round(100 * share)}_ms": 1000 * latency.at(share).value
        for name in _LATENCIES
        if (latency := getattr(kind.latencies, name)) is not None
        for share in (0.5, 0.9, 0.99)
    }
    return {
        "requests": kind.num_requests,
        "not_complete": kind.num_not_complete,
        "good_share": kind.good_share.value,
        "goodput_per_s": kind.goodput_per_s.value,
        "cache_hit": kind.cache.hit_share.value if kind.cache else None,
        "output_tokens_per_s": summary.throughput.output_tokens_per_s,
        **latencies_ms,
    }

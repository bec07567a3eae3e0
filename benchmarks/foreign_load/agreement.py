"""Whether load generators agree, and the table that shows it."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from benchmarks.foreign_load.report import ToolReport

Results = Mapping[tuple[int, str], Sequence[ToolReport]]
"""Reports of the rounds, by concurrency and tool."""

OURS = "kvrelay bench"
_MEASURES = {"TTFT p50": "ttft_p50_s", "TPOT p50": "tpot_p50_s", "E2E p50": "e2e_p50_s"}


def verdicts(results: Results) -> Iterable[str]:
    """Yield a sentence for each load, measure and foreign tool."""
    for (concurrency, tool), reports in results.items():
        if tool == OURS:
            continue
        for title, name in _MEASURES.items():
            theirs = [getattr(report, name) for report in reports]
            mine = [getattr(report, name) for report in results[concurrency, OURS]]
            ratio = statistics.median(mine) / statistics.median(theirs)
            meet = "meet" if min(mine) <= max(theirs) and min(theirs) <= max(mine) else "do not meet"
            ranges = f"; the ranges over {len(mine)} rounds {meet}" if len(mine) > 1 else ""
            yield f"{concurrency} users, {title}: ours is {ratio:.2f} times {tool}'s{ranges}"


def table(results: Results) -> Table:
    """Return medians over the rounds with their range, in milliseconds."""
    shown = Table(title="milliseconds, as each tool reports them; median over the rounds (range)")
    for name in ("users", "tool", "answered", "failed", "prompt tokens", "output tokens", *_MEASURES):
        shown.add_column(name, justify="left" if name == "tool" else "right", no_wrap=True)
    for (concurrency, tool), reports in sorted(results.items()):
        shown.add_row(
            str(concurrency),
            tool,
            str(sum(report.num_complete for report in reports)),
            str(sum(report.num_failed for report in reports)),
            f"{sum(report.num_prompt_tokens for report in reports):,}",
            f"{sum(report.num_output_tokens for report in reports):,}",
            *(_spread([getattr(report, name) for report in reports]) for name in _MEASURES.values()),
        )
    return shown


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1000:.1f} ({min(values) * 1000:.1f}–{max(values) * 1000:.1f})"

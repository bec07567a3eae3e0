"""Whether load generators agree."""

from collections.abc import Iterator

from benchmarks.figures import Figures
from benchmarks.foreign_load.report import ToolReport

OURS = "kvrelay bench"
TIMES = "times"
"""Part of the figures whose values are compared; milliseconds."""
COUNTS = "counts"


def add_report(figures: Figures, users: int, tool: str, report: ToolReport) -> None:
    """Add what a tool says of one round."""
    case = f"{users} users"
    names = ("ttft_p50", "tpot_p50", "e2e_p50", "ttft_mean", "tpot_mean")
    times_ms = {f"{name.replace('_', ' ').upper()} ms": 1000 * getattr(report, f"{name}_s") for name in names}
    figures.add(TIMES, case, tool, **times_ms)
    figures.add(
        COUNTS,
        case,
        tool,
        answered=report.num_complete,
        failed=report.num_failed,
        prompt_tokens=report.num_prompt_tokens,
        output_tokens=report.num_output_tokens,
    )


def verdicts(figures: Figures) -> Iterator[str]:
    """Yield a sentence for each load, median and foreign tool."""
    for (part, case, tool, unit), theirs in figures.all.items():
        if part != TIMES or tool == OURS or "P50" not in unit:
            continue
        mine = figures.all[part, case, OURS, unit]
        is_met = min(mine.rounds) <= max(theirs.rounds) and min(theirs.rounds) <= max(mine.rounds)
        ranges = f"; the ranges over {len(mine.rounds)} rounds {'meet' if is_met else 'do not meet'}"
        ratio = mine.median / theirs.median
        yield f"{case}, {unit}: ours is {ratio:.2f} times {tool}'s{ranges if len(mine.rounds) > 1 else ''}"

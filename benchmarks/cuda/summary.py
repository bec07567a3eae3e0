"""All parts on one page: what failed, which goals were set and which were reached.

    python -m benchmarks.cuda.summary [--out DIR] [--expect PART ...]

Exit status: 1 when a part failed or is missing, else 2 when a goal was missed, else 0.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cuda.report import DEFAULT_OUT, Failure, Report, markdown_table

_FILE = "summary.md"


def summarize(reports: Sequence[Report], missing: Sequence[str]) -> tuple[str, int]:
    """Return the page and the exit status."""
    goals = [(report, reading) for report in reports for reading in report.readings if reading.goal is not None]
    failures = [(report.part, failure) for report in reports for failure in report.failures]
    failures += [(part, Failure(case="all of it", reason="it left no result")) for part in missing]
    lines = ["# Summary", ""]
    if goals:
        rows = [
            (
                reading.case,
                f"{reading.goal:g}",
                "not measured" if reading.ratio is None else f"{reading.ratio:.2f}",
                "met" if reading.is_met else "MISSED",
            )
            for _, reading in goals
        ]
        lines += [*markdown_table(("case", "goal", "reached", ""), rows), ""]
    lines += [f"FAILED {part}, {failure.case}: {failure.reason}" for part, failure in failures]
    num_met = sum(reading.is_met is True for _, reading in goals)
    lines.append(f"{num_met} of {len(goals)} goals met, {len(failures)} failures")
    status = 1 if failures else 2 if num_met < len(goals) else 0
    return "\n".join(lines), status


def main(argv: list[str] | None = None) -> int:
    """Print and save the page; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda.summary", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"folder of the JSON (default {DEFAULT_OUT})")
    parser.add_argument("--expect", nargs="*", default=[], help="parts that must have left a result")
    args = parser.parse_args(argv)
    paths = {name: args.out / f"{name}.json" for name in args.expect}
    reports = [Report.load(path) for path in paths.values() if path.is_file()]
    page, status = summarize(reports, [name for name, path in paths.items() if not path.is_file()])
    tables = "\n\n".join(report.table() for report in reports)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / _FILE).write_text(f"{page}\n\n{tables}\n", encoding="utf-8")
    print(page)
    return status


if __name__ == "__main__":
    sys.exit(main())

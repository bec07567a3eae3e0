"""Request to a load generator, its report, and whether the reports of several agree."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figures

OURS = "kvrelay bench"
TIMES = "times"
"""Part of the figures whose values are compared; milliseconds."""
COUNTS = "counts"


class ToolFailed(Exception):
    """A tool could not be run, or its report cannot be read; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A closed loop."""

    concurrency: int
    num_requests: int
    num_prompt_tokens: int
    """Tokens of the user's message; the chat template adds more."""
    num_output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Server that a tool asks."""

    root_url: str
    """Address of the door, without /v1."""
    model: str
    tokenizer_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReport:
    """A tool's own figures of one run."""

    num_complete: int
    num_failed: int
    num_prompt_tokens: int
    """Tokens of all requests, by the server's count."""
    num_output_tokens: int
    ttft_p50_s: float
    ttft_mean_s: float
    tpot_p50_s: float
    """A request's mean gap between tokens: what guidellm and aiperf call inter-token latency."""
    tpot_mean_s: float
    e2e_p50_s: float

    def faults(self, load: Load) -> list[str]:
        """Return what is not as it was asked for, in words."""
        faults = []
        if self.num_failed or self.num_complete != load.num_requests:
            faults.append(f"{self.num_complete} of {load.num_requests} answered, {self.num_failed} failed")
        wanted = load.num_requests * load.num_output_tokens
        if self.num_output_tokens != wanted:
            faults.append(f"{self.num_output_tokens} output tokens, not {wanted}")
        if self.num_prompt_tokens < load.num_requests * load.num_prompt_tokens:
            faults.append(f"only {self.num_prompt_tokens} prompt tokens")
        return faults


Tool = Callable[[Asked, Load, Path], ToolReport]
"""Runs a load; keeps what it writes in a folder of its own, which exists. Raises ToolFailed."""


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

"""Simulated arms side by side, each in a process, to use several cores.

Every process does what the command would do for its arm alone, in the same folder: cells of different arms share no
files. Running the experiment afterwards finds all cells kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from measure.experiment.prepare import Choices, prepare
from measure.experiment.runner import Report, ResultKeeper
from measure.experiment.search import measure
from measure.experiment.simulated import SimulatedBench
from measure.experiment.store import Store
from measure.simulate.comparison import in_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Input of all processes."""

    path: Path
    """The experiment's file."""
    choices: Choices
    out: Path
    is_search: bool
    """Whether capacities are searched in place of the grid."""


def measure_side_by_side(errand: Errand, arms: Sequence[str], *, num_jobs: int, report: Report) -> None:
    """Measure arms in order, `num_jobs` at a time; returns when all are done.

    `report` gets the lines of an arm's process when it has ended. The first error, which is raised, or an interrupt
    ends all processes; finished cells stay.
    """
    for lines in in_processes(_measure_arm, [(errand, arm) for arm in arms], num_jobs=num_jobs):
        for line in lines:
            report(line)


def _measure_arm(errand: Errand, arm: str) -> Sequence[str]:
    """Measure one arm and return its report."""
    prepared = prepare(errand.path, errand.choices)
    plans = tuple(plan for plan in prepared.arms.plans if plan.arm.name == arm)
    prepared = replace(prepared, arms=replace(prepared.arms, plans=plans))
    lines: list[str] = []
    keeper = ResultKeeper(Store(errand.out), prepared.source, lines.append)
    bench = SimulatedBench(prepared.spec, prepared.workloads)
    measure(prepared, keeper, bench, is_search=errand.is_search)
    return [line if arm in line else f"{arm}: {line}" for line in lines]

"""Simulated arms side by side: a process for each arm, so that many cores are of use.

Every process does what the command would do for its arm alone, in the same folder: cells of different arms share no
file. Whoever runs the experiment afterwards finds everything measured.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from measure.experiment.prepare import Choices, prepare
from measure.experiment.runner import Keeper, Report, run_cells
from measure.experiment.search import find_capacities
from measure.experiment.simulated import SimulatedBench
from measure.experiment.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What all processes are told."""

    path: Path
    """The experiment's file."""
    choices: Choices
    out: Path
    is_search: bool
    """Whether capacities are searched, in place of the grid."""


def measure_side_by_side(errand: Errand, arms: Sequence[str], *, num_jobs: int, report: Report) -> None:
    """Measure arms, the first ones first, so many at a time; returns when all are done.

    `report` hears what an arm's process has to say once that has ended. The first error ends all and is raised, as is
    an interrupt; finished cells stay.
    """
    for lines in _in_processes(errand, arms, num_jobs):
        for line in lines:
            report(line)


def _in_processes(errand: Errand, arms: Sequence[str], num_jobs: int) -> Iterator[Sequence[str]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(_measure_arm, errand, arm) for arm in arms]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # an interrupt, too: nobody waits for minutes until the running cells are done
            for future in futures:
                future.cancel()
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _measure_arm(errand: Errand, arm: str) -> Sequence[str]:
    """Measure one arm and return what there is to say of it."""
    prepared = prepare(errand.path, errand.choices)
    plans = tuple(plan for plan in prepared.arms.plans if plan.arm.name == arm)
    prepared = replace(prepared, arms=replace(prepared.arms, plans=plans))
    lines: list[str] = []
    keeper = Keeper(Store(errand.out), prepared.source, lines.append)
    bench = SimulatedBench(prepared.spec, prepared.workloads)
    if errand.is_search:
        spec = prepared.spec.capacity
        find_capacities(plans, spec, keeper, bench, start=prepared.spec.loads[0])
    else:
        run_cells(prepared.cells, plans, keeper, bench)
    return [line if arm in line else f"{arm}: {line}" for line in lines]

"""Searches the capacity of arms; cells that are kept are not measured again.

Simulated arms run side by side, each in a process, to use several cores; without a search, so do their loads. Every
process does what the command would do for its part alone, in the same folder: cells share no files. Running the
experiment afterwards finds all cells kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from measure.experiment.arms import ArmPlan
from measure.experiment.capacity import first_load, searched_loads
from measure.experiment.ended import counting_here
from measure.experiment.points import Cell
from measure.experiment.prepare import Experiment, SimulatedWorkloads
from measure.experiment.runner import Bench, Report, ResultKeeper, run_arm, run_cells
from measure.experiment.simulated import SimulatedBench
from measure.experiment.spec import CapacitySpec
from measure.experiment.store import Store
from measure.simulate.store import in_processes


def find_capacity(plan: ArmPlan, spec: CapacitySpec, keeper: ResultKeeper, bench: Bench, *, start: float) -> None:
    """Search an arm's capacity, from `start` if `spec` names no load; the keeper gets the points.

    Raises ExperimentError, KeyboardInterrupt.
    """

    def cells_at(load: float) -> list[Cell]:
        return [Cell(arm=plan.arm.name, load=load, repeat=repeat) for repeat in range(spec.repeats)]

    keeper.report(f"{plan.arm.name}: looking for the highest load with {spec.share:.1%} good requests")
    first = first_load(plan.arm.num_workers, spec, default=start)
    loads = searched_loads(first, spec, lambda load: keeper.points(cells_at(load)))
    run_arm(plan, (cell for load in loads for cell in cells_at(load)), keeper, bench)


def measure(experiment: Experiment[SimulatedWorkloads], keeper: ResultKeeper, bench: Bench, *, is_search: bool) -> None:
    """Measure an experiment's cells, or search the capacities of its arms; the keeper gets the results."""
    spec, plans = experiment.spec, experiment.arms.plans
    if not is_search:
        run_cells(experiment.cells, plans, keeper, bench)
        return
    for plan in plans:
        find_capacity(plan, spec.capacity, keeper, bench, start=spec.loads[0])


def measure_side_by_side(
    experiment: Experiment[SimulatedWorkloads], store: Store, *, num_jobs: int, is_search: bool, report: Report
) -> None:
    """Measure parts of a simulated experiment, `num_jobs` at a time, the largest arms first: they take longest.

    `report` gets the lines of a part's process when it has ended. The first error, which is raised, or an interrupt
    ends all processes; finished cells stay.
    """
    run = partial(_measure_part, is_search=is_search)
    tasks = [(part, store) for part in _parts(experiment, store, is_search=is_search)]
    for lines in in_processes(run, tasks, num_jobs=num_jobs, prepare=counting_here()):
        for line in lines:
            report(line)


def _parts(
    experiment: Experiment[SimulatedWorkloads], store: Store, *, is_search: bool
) -> Iterator[Experiment[SimulatedWorkloads]]:
    """Yield the parts that can be measured apart: an arm's search, or its cells at a load if any of them is missing."""
    for plan in sorted(experiment.arms.plans, key=lambda plan: -plan.arm.num_workers):
        arm = replace(experiment, arms=replace(experiment.arms, plans=(plan,)))
        if is_search:
            yield arm
            continue
        for load in experiment.spec.loads:
            part = replace(arm, spec=experiment.spec.model_copy(update={"loads": (load,)}))
            if any(store.point(experiment.source, cell) is None for cell in part.cells):
                yield part


def _measure_part(experiment: Experiment[SimulatedWorkloads], store: Store, *, is_search: bool) -> Sequence[str]:
    """Measure a part of an experiment, with one arm, and return its report."""
    lines: list[str] = []
    bench = SimulatedBench(experiment.spec, experiment.workloads)
    measure(experiment, ResultKeeper(store, experiment.source, lines.append), bench, is_search=is_search)
    arm = experiment.arms.plans[0].arm.name
    return [line if arm in line else f"{arm}: {line}" for line in lines]

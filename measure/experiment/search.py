"""Searches the capacity of arms; cells that are kept are not measured again.

Simulated arms run side by side, each in a process, to use several cores. Every process does what the command would do
for its arm alone, in the same folder: cells of different arms share no files. Running the experiment afterwards finds
all cells kept.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from measure.experiment.arms import ArmPlan
from measure.experiment.capacity import ArmCapacity, find_capacity
from measure.experiment.points import Cell, Point
from measure.experiment.prepare import Choices, Experiment, prepare
from measure.experiment.runner import ArmFailed, Bench, CellFailed, Measure, Report, ResultKeeper, point_line, run_cells
from measure.experiment.simulated import SimulatedBench
from measure.experiment.spec import CapacitySpec
from measure.experiment.store import Store
from measure.simulate.store import in_processes


def find_capacities(
    plans: Sequence[ArmPlan], spec: CapacitySpec, keeper: ResultKeeper, bench: Bench, *, start: float
) -> tuple[ArmCapacity, ...]:
    """Return the arms' capacities, searched from `start` if `spec` names no load; the keeper knows the failures.

    Raises ExperimentError, KeyboardInterrupt.
    """
    found = []
    for plan in plans:
        keeper.report(f"{plan.arm.name}: looking for the highest load with {spec.share:.1%} good requests")
        first = spec.first_load(plan.arm.num_workers, default=start)
        try:
            with ExitStack() as stack:
                arm = _Arm(plan, keeper, bench, stack)
                found.append(find_capacity(plan.arm, bench.source, spec, start=first, probe=arm.probe))
        except (ArmFailed, CellFailed) as error:
            keeper.give_up(arm.last, str(error))
        else:
            keeper.store.keep_capacity(found[-1])
            keeper.report(f"{plan.arm.name}: {capacity_line(found[-1])}")
    return tuple(found)


def capacity_line(capacity: ArmCapacity) -> str:
    """Return a capacity in words."""
    if not capacity.load:
        return f"no load that was tried had {capacity.share:.1%} good requests"
    high = f"{capacity.high:.3g}" if capacity.high is not None else "more"
    return (
        f"serves {capacity.load:g}/s (95 %: {capacity.low:.3g} to {high}),"
        f" {capacity.goodput_per_worker:.2f} good requests/s and worker"
    )


def measure(experiment: Experiment, keeper: ResultKeeper, bench: Bench, *, is_search: bool) -> None:
    """Measure an experiment's cells, or search the capacities of its arms; the keeper gets the results."""
    spec, plans = experiment.spec, experiment.arms.plans
    if is_search:
        find_capacities(plans, spec.capacity, keeper, bench, start=spec.loads[0])
    else:
        run_cells(experiment.cells, plans, keeper, bench)


class _Arm:
    """An arm that is started for the first cell that is not kept, and stopped by the stack."""

    def __init__(self, plan: ArmPlan, keeper: ResultKeeper, bench: Bench, stack: ExitStack) -> None:
        self._plan = plan
        self._keeper = keeper
        self._bench = bench
        self._stack = stack
        self._measure: Measure | None = None
        self.last = Cell(arm=plan.arm.name, load=0.0, repeat=0)
        """Cell that was probed last."""

    def probe(self, load: float, repeat: int) -> Point:
        """Return a run's point. Raises ArmFailed, CellFailed."""
        self.last = Cell(arm=self._plan.arm.name, load=load, repeat=repeat)
        kept = self._keeper.kept(self.last)
        if kept is not None:
            return kept
        if self._measure is None:
            self._measure = self._stack.enter_context(self._bench.serve(self._plan))
        point = self._keeper.measure(self.last, self._measure)
        self._keeper.report(point_line(point))
        return point


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentInput:
    """Input of each of the processes that share an experiment."""

    path: Path
    """The experiment's file."""
    choices: Choices
    out: Path
    is_search: bool
    """Whether capacities are searched in place of the grid."""


def measure_side_by_side(inputs: ExperimentInput, arms: Sequence[str], *, num_jobs: int, report: Report) -> None:
    """Measure arms in order, `num_jobs` at a time; returns when all are done.

    `report` gets the lines of an arm's process when it has ended. The first error, which is raised, or an interrupt
    ends all processes; finished cells stay.
    """
    for lines in in_processes(_measure_arm, [(inputs, arm) for arm in arms], num_jobs=num_jobs):
        for line in lines:
            report(line)


def _measure_arm(inputs: ExperimentInput, arm: str) -> Sequence[str]:
    """Measure one arm and return its report."""
    prepared = prepare(inputs.path, inputs.choices)
    plans = tuple(plan for plan in prepared.arms.plans if plan.arm.name == arm)
    prepared = replace(prepared, arms=replace(prepared.arms, plans=plans))
    lines: list[str] = []
    keeper = ResultKeeper(Store(inputs.out), prepared.source, lines.append)
    bench = SimulatedBench(prepared.spec, prepared.workloads)
    measure(prepared, keeper, bench, is_search=inputs.is_search)
    return [line if arm in line else f"{arm}: {line}" for line in lines]

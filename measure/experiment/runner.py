"""Runs an experiment's cells: in which order, on which cluster, and what becomes of those that fail.

Real and simulated arms differ only in the `Bench` that measures them. Finished cells are kept; an interruption drops
the one that runs and leaves nothing behind. A cell that fails, or an arm that does not start, is noted, and the
others go on.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from measure.experiment.arms import ArmPlan
from measure.experiment.capacity import Capacity
from measure.experiment.points import Point, Source
from measure.experiment.progress import Countdown, point_line, span
from measure.experiment.spec import Order
from measure.experiment.store import Cell, Store

Report = Callable[[str], None]
Measure = Callable[[Cell, Path], Point]
"""Runs a cell and returns its point; raw data go to the folder. Raises CellFailed."""


class ArmFailed(Exception):
    """An arm cannot be started; the message says why."""


class CellFailed(Exception):
    """A run gave no result; the message says why."""


class Bench(Protocol):
    """Serves arms and measures them: `real.RealBench`, `simulated.SimulatedBench`."""

    @property
    def source(self) -> Source:
        """What its points are."""

    def serve(self, plan: ArmPlan) -> AbstractContextManager[Measure]:
        """Start an arm, ready to be measured; stops it at the end. Raises ArmFailed."""

    def seconds(self, num_cells: int, num_starts: int) -> float:
        """Return about how long so many cells take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What was not measured, and why."""

    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an experiment."""

    points: tuple[Point, ...]
    failures: tuple[Failure, ...]


def cell_order(arms: Sequence[str], loads: Sequence[float], *, repeats: int, order: Order) -> tuple[Cell, ...]:
    """Return all cells, those next to each other that can share a cluster.

    Alternating: every repeat runs each arm with all its loads, every other repeat in the opposite order of the arms and
    of the loads, so that a drift of the machine is the same for all in the mean.
    """
    if order is Order.BY_ARM:
        return tuple(Cell(arm=arm, load=load, repeat=n) for arm in arms for n in range(repeats) for load in loads)
    cells = []
    for repeat in range(repeats):
        step = -1 if repeat % 2 else 1
        cells += [Cell(arm=arm, load=load, repeat=repeat) for arm in arms[::step] for load in loads[::step]]
    return tuple(cells)


def run_cells(cells: Sequence[Cell], plans: Sequence[ArmPlan], keeper: "Keeper", bench: Bench) -> Outcome:
    """Run the cells that are missing and return the points of all. Raises KeyboardInterrupt."""
    by_name = {plan.arm.name: plan for plan in plans}
    missing = [cell for cell in cells if keeper.kept(cell) is None]
    starts = [(arm, list(group)) for arm, group in groupby(missing, key=lambda cell: cell.arm)]
    estimate = f", about {span(bench.seconds(len(missing), len(starts)))}" if missing else ""
    earlier = f"; {len(cells) - len(missing)} are kept from earlier" if len(missing) < len(cells) else ""
    keeper.report(f"{len(missing)} runs{estimate}{earlier}")
    countdown = Countdown(num_cells=len(missing))
    broken: dict[str, str] = {}
    for arm, group in starts:
        if arm not in broken:
            try:
                with bench.serve(by_name[arm]) as measure:
                    while group:
                        _run_cell(group.pop(0), measure, keeper, countdown)
            except ArmFailed as error:
                broken[arm] = str(error)
        for cell in group:  # what is left of an arm that has failed, which would not start the next time either
            countdown.step()
            keeper.give_up(cell, broken[arm])
    points = tuple(point for cell in cells if (point := keeper.kept(cell)) is not None)
    return Outcome(points=points, failures=keeper.failures)


def _run_cell(cell: Cell, measure: Measure, keeper: "Keeper", countdown: Countdown) -> None:
    try:
        point = keeper.measure(cell, measure)
    except CellFailed as error:
        countdown.step()
        keeper.give_up(cell, str(error))
    else:
        keeper.report(f"{countdown.step()} {point_line(point)}")


class Keeper:
    """Keeps what comes of cells and of searches."""

    def __init__(self, store: Store, source: Source, report: Report) -> None:
        self._store = store
        self._source = source
        self._failures: list[Failure] = []
        self.report = report

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Those of now, not of earlier tries."""
        return tuple(self._failures)

    def kept(self, cell: Cell) -> Point | None:
        """Return the point of a cell that is complete."""
        return self._store.point(self._source, cell)

    def measure(self, cell: Cell, measure: Measure) -> Point:
        """Run a cell and keep its point; one that is interrupted leaves nothing. Raises CellFailed."""
        folder = self._store.begin(self._source, cell)
        try:
            point = measure(cell, folder)
        except CellFailed:
            raise
        except BaseException:
            self._store.drop(self._source, cell)
            raise
        self._store.keep(self._source, cell, point)
        return point

    def keep_capacity(self, capacity: Capacity) -> None:
        """Keep what an arm can serve."""
        self._store.keep_capacity(capacity)

    def give_up(self, cell: Cell, reason: str) -> None:
        """Note that there is no point, and why."""
        self._failures.append(Failure(cell=cell, reason=reason))
        self._store.keep_failure(self._source, cell, reason)
        self.report(f"{cell.name} FAILED: {reason}")

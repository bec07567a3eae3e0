"""Runs an experiment's cells in order, keeps their points, and notes failures.

Real and simulated arms differ only in the `Bench` that measures them. Finished cells are kept; an interruption drops
the running one and leaves nothing behind. When a cell fails or an arm does not start, the others go on.
"""

import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol

from measure.experiment.arms import ArmPlan
from measure.experiment.points import Cell, Point, Source
from measure.experiment.spec import CellOrder
from measure.experiment.store import Store

Report = Callable[[str], None]
Measure = Callable[[Cell, Path], Point]
"""Runs a cell and returns its point; raw data go into the folder. Raises CellFailed."""


class ArmFailed(Exception):
    """An arm cannot be started; the message says why."""


class CellFailed(Exception):
    """A run gave no result; the message says why."""


class Bench(Protocol):
    """Serves arms and measures them: `real.RealBench`, `simulated.SimulatedBench`."""

    @property
    def source(self) -> Source:
        """Source of its points."""

    def serve(self, plan: ArmPlan) -> AbstractContextManager[Measure]:
        """Start an arm, ready to be measured; stops it at the end. Raises ArmFailed."""

    def seconds(self, num_cells: int, num_starts: int) -> float:
        """Return the approximate time of so many cells."""


def cell_order(arms: Sequence[str], loads: Sequence[float], *, repeats: int, order: CellOrder) -> tuple[Cell, ...]:
    """Return all cells; neighbours share a cluster where possible.

    Alternating: every repeat runs each arm with all its loads, every other one in the opposite order of arms and loads,
    so that a drift of the machine affects all arms alike on average.
    """
    if order is CellOrder.BY_ARM:
        return tuple(Cell(arm=arm, load=load, repeat=n) for arm in arms for n in range(repeats) for load in loads)
    cells = []
    for repeat in range(repeats):
        step = -1 if repeat % 2 else 1
        cells += [Cell(arm=arm, load=load, repeat=repeat) for arm in arms[::step] for load in loads[::step]]
    return tuple(cells)


def run_cells(
    cells: Sequence[Cell], plans: Sequence[ArmPlan], keeper: "ResultKeeper", bench: Bench
) -> tuple[Point, ...]:
    """Run the missing cells and return the points of all; the keeper knows the failures. Raises KeyboardInterrupt."""
    by_name = {plan.arm.name: plan for plan in plans}
    missing = [cell for cell in cells if keeper.kept(cell) is None]
    starts = [(arm, list(group)) for arm, group in itertools.groupby(missing, key=lambda cell: cell.arm)]
    estimate = f", about {span(bench.seconds(len(missing), len(starts)))}" if missing else ""
    earlier = f"; {len(cells) - len(missing)} are kept from earlier" if len(missing) < len(cells) else ""
    keeper.report(f"{len(missing)} runs{estimate}{earlier}")
    keeper.expect(len(missing))
    broken: dict[str, str] = {}
    for arm, group in starts:
        if arm in broken:
            for cell in group:
                keeper.give_up(cell, broken[arm])
        elif (reason := run_arm(by_name[arm], group, keeper, bench)) is not None:
            broken[arm] = reason
    return keeper.points(cells)


def run_arm(plan: ArmPlan, cells: Iterable[Cell], keeper: "ResultKeeper", bench: Bench) -> str | None:
    """Run the cells of an arm that are not kept; the first of them starts it. Raises KeyboardInterrupt.

    Returns why the arm failed, noted for all cells that are left; None if it did not.
    """
    left = iter(cells)
    measure: Measure | None = None
    try:
        with ExitStack() as stack:
            for cell in left:
                if keeper.kept(cell) is None:
                    measure = measure or stack.enter_context(bench.serve(plan))
                    keeper.run(cell, measure)
    except ArmFailed as error:
        for each in itertools.chain([cell], left):
            if keeper.kept(each) is None and each not in keeper.failures:
                keeper.give_up(each, str(error))
        return str(error)
    return None


class ResultKeeper:
    """Keeps the results of cells."""

    def __init__(self, store: Store, source: Source, report: Report) -> None:
        self.store = store
        self.report = report
        self.failures: list[Cell] = []
        """Cells that failed in this run."""
        self._source = source
        self._progress: Callable[[], str] = str

    def expect(self, num_cells: int) -> None:
        """Tell the progress from now on, as a part of so many cells."""
        self._progress = Countdown(num_cells=num_cells).step

    def kept(self, cell: Cell) -> Point | None:
        """Return the point of a complete cell; None for any other."""
        return self.store.point(self._source, cell)

    def points(self, cells: Iterable[Cell]) -> tuple[Point, ...]:
        """Return the points of the complete ones of these cells."""
        return tuple(point for cell in cells if (point := self.kept(cell)) is not None)

    def run(self, cell: Cell, measure: Measure) -> None:
        """Run a cell and keep its point, or note why it has none; an interrupted cell leaves nothing."""
        folder = self.store.folder(self._source, cell)
        shutil.rmtree(folder, ignore_errors=True)  # files of earlier tries
        folder.mkdir(parents=True)
        try:
            point = measure(cell, folder)
        except CellFailed as error:
            self.give_up(cell, str(error))
        except BaseException:
            shutil.rmtree(folder)
            raise
        else:
            self.store.keep(self._source, cell, point)
            self._report_progress(point_line(point))

    def give_up(self, cell: Cell, reason: str) -> None:
        """Note why a cell has no point; the next run tries it again."""
        self.failures.append(cell)
        folder = self.store.folder(self._source, cell)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failure.txt").write_text(reason + "\n", encoding="utf-8")
        self._report_progress(f"{cell.name} FAILED: {reason}")

    def _report_progress(self, result: str) -> None:
        self.report(f"{self._progress()} {result}".lstrip())


class Countdown:
    """Number of runs that are left, and their approximate time."""

    def __init__(self, *, num_cells: int, now: Callable[[], float] = time.monotonic) -> None:
        self._num_cells = num_cells
        self._num_done = 0
        self._now = now
        self._start_s = now()

    def step(self) -> str:
        """Note the end of a run; return the progress in words."""
        self._num_done += 1
        num_left = self._num_cells - self._num_done
        each_s = (self._now() - self._start_s) / self._num_done
        left = f", about {span(num_left * each_s)} left" if num_left > 0 else ""
        return f"[{self._num_done}/{self._num_cells}{left}]"


def span(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def point_line(point: Point) -> str:
    """Return the result of a run in words."""
    overall = point.overall
    text = (
        f"{point.arm.name} at {point.load:g} {point.load_unit}: {point.goodput_per_s:.2f} good requests/s"
        f" ({overall.good_share:.1%} of {overall.num_requests})"
    )
    if overall.ttft is not None:
        text += f", p99 TTFT {overall.ttft.p99:.2f} s"
    if overall.itl is not None:
        text += f", p99 ITL {overall.itl.p99 * 1000:.0f} ms"
    return text + "".join(f"; {warning}" for warning in point.warnings)

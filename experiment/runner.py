"""Runs an experiment's cells: in which order, on which cluster, and what becomes of those that fail.

Real and simulated arms differ only in the `Bench` that measures them. Finished cells are kept; an interruption drops
the one that runs and leaves nothing behind. A cell that fails, or an arm that does not start, is noted, and the
others go on.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from experiment.arms import ArmPlan
from experiment.points import Point, Source
from experiment.spec import Order
from experiment.store import Cell, Store

Report = Callable[[str], None]
Measure = Callable[[Cell, Path], Point]
"""Runs a cell and returns its point; raw data go to the folder. Raises CellFailed."""


class ArmFailed(Exception):
    """An arm cannot be started; the message says why."""


class CellFailed(Exception):
    """A run gave no result; the message says why."""


class Bench(Protocol):
    """Serves arms and measures them: `real.RealBench`, `simulated.SimulatedBench`, both made of (spec, path)."""

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


class Runner:
    """Runs cells that are not finished yet."""

    def __init__(self, *, plans: Sequence[ArmPlan], bench: Bench, store: Store, report: Report) -> None:
        self._plans = {plan.arm.name: plan for plan in plans}
        self._bench = bench
        self._store = store
        self._report = report
        self._failures: list[Failure] = []

    def run(self, cells: Sequence[Cell]) -> Outcome:
        """Run what is missing and return the cells' points and failures. Raises KeyboardInterrupt, ExperimentError."""
        missing = [cell for cell in cells if self._kept(cell) is None]
        starts = [(arm, list(group)) for arm, group in groupby(missing, key=lambda cell: cell.arm)]
        self._announce(cells, missing, num_starts=len(starts))
        countdown = Countdown(num_cells=len(missing))
        broken: dict[str, str] = {}
        for arm, group in starts:
            if arm in broken:  # it would not start the next time either
                self._give_up(group, broken[arm])
                continue
            try:
                with self._bench.serve(self._plans[arm]) as measure:
                    for cell in group:
                        self.measure(measure, cell, countdown)
            except ArmFailed as error:
                broken[arm] = str(error)
                self._give_up([cell for cell in group if self._kept(cell) is None], str(error))
        points = tuple(point for cell in cells if (point := self._kept(cell)) is not None)
        return Outcome(points=points, failures=tuple(self._failures))

    def measure(self, measure: Measure, cell: Cell, countdown: "Countdown") -> Point | None:
        """Run a cell and keep its point, or note why there is none; an interrupted cell leaves nothing."""
        source = self._bench.source
        folder = self._store.begin(source, cell)
        try:
            point = measure(cell, folder)
        except CellFailed as error:
            self._give_up([cell], str(error))
            return None
        except BaseException:
            self._store.drop(source, cell)
            raise
        self._store.keep(source, cell, point)
        self._report(f"{countdown.step()} {_told(point)}")
        return point

    def _kept(self, cell: Cell) -> Point | None:
        return self._store.point(self._bench.source, cell)

    def _give_up(self, cells: Sequence[Cell], reason: str) -> None:
        for cell in cells:
            self._failures.append(Failure(cell=cell, reason=reason))
            self._store.keep_failure(self._bench.source, cell, reason)
            self._report(f"{cell.name} FAILED: {reason}")

    def _announce(self, cells: Sequence[Cell], missing: Sequence[Cell], *, num_starts: int) -> None:
        kept = len(cells) - len(missing)
        estimate_s = self._bench.seconds(len(missing), num_starts)
        self._report(
            f"{len(missing)} runs, about {span(estimate_s)}" + (f"; {kept} are kept from earlier" if kept else "")
        )


class Countdown:
    """Tells how many runs are left, and how long they take."""

    def __init__(self, *, num_cells: int, now: Callable[[], float] = time.monotonic) -> None:
        self._num_cells = num_cells
        self._num_done = 0
        self._now = now
        self._start_s = now()

    def step(self) -> str:
        """Note that a run has ended; return where one is."""
        self._num_done += 1
        num_left = self._num_cells - self._num_done
        each_s = (self._now() - self._start_s) / self._num_done
        left = f", {span(num_left * each_s)} left" if num_left > 0 else ""
        return f"[{self._num_done}/{self._num_cells}{left}]"


def span(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _told(point: Point) -> str:
    everybody = point.overall
    text = (
        f"{point.arm.name} at {point.load:g}/s: {point.goodput_per_s:.2f} good requests/s"
        f" ({everybody.good_share:.1%} of {everybody.num_requests})"
    )
    if everybody.ttft is not None:
        text += f", p99 TTFT {everybody.ttft.p99:.2f} s"
    if everybody.itl is not None:
        text += f", p99 ITL {everybody.itl.p99 * 1000:.0f} ms"
    return text + "".join(f"; {warning}" for warning in point.warnings)

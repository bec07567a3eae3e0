"""A bench without servers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from measure.experiment.arms import ArmPlan
from measure.experiment.points import Point, Source
from measure.experiment.runner import ArmFailed, Measure
from measure.experiment.store import Cell
from tests.measure.experiment.builders import make_arm, make_point

Step = Callable[[Cell], None]


class FakeBench:
    """Remembers what it was asked to do; `before` may raise what a run may raise."""

    source = Source.REAL

    def __init__(self, *, before: Step | None = None, broken: tuple[str, ...] = ()) -> None:
        self.log: list[str] = []
        self._before = before
        self._broken = broken

    @contextmanager
    def serve(self, plan: ArmPlan) -> Iterator[Measure]:
        """Start and stop nothing."""
        if plan.arm.name in self._broken:
            raise ArmFailed("no such hardware")
        self.log.append(f"up {plan.arm.name}")
        try:
            yield self._measure
        finally:
            self.log.append(f"down {plan.arm.name}")

    def seconds(self, num_cells: int, num_starts: int) -> float:
        """Return a second for each."""
        return num_cells + num_starts

    def _measure(self, cell: Cell, folder: Path) -> Point:
        self.log.append(cell.name)
        (folder / "requests.jsonl").write_text("{}\n", encoding="utf-8")
        if self._before is not None:
            self._before(cell)
        num_good = 100 if cell.load <= 2 else 50
        return make_point(arm=make_arm(cell.arm), load=cell.load, repeat=cell.repeat, num_good=num_good)


def make_plan(name: str) -> ArmPlan:
    """Return the plan of an arm that somebody else serves."""
    return ArmPlan(arm=make_arm(name), serving=None, url="127.0.0.1:1")

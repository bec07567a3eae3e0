"""Results of an experiment on disk, so that it can continue after a stop.

DIR/experiment.yaml             the experiment's file
DIR/settings.json               settings that all cells share, and each arm's settings
DIR/real/CELL/point.json        `Point`; a cell is complete once it has one
DIR/real/CELL/…                 raw data: run.json, requests.jsonl, samples.jsonl, report.html
DIR/real/CELL/failure.txt       why there is no point
DIR/simulated/CELL/…            the same for simulated arms; raw data: requests.jsonl
DIR/arms/ARM/                   serving.yaml and logs of its cluster, timing models of its workers
DIR/report.html
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from measure.experiment.points import Cell, Point, Source, slug
from measure.experiment.spec import ExperimentError
from measure.simulate.store import ResultFolder, write_json

_POINT = TypeAdapter(Point)


class Store(ResultFolder):
    """An experiment's folder."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, *Source, "arms")

    def folder(self, source: Source, cell: Cell) -> Path:
        """Return the folder of a cell."""
        return self.out / source.value / cell.name

    def arm_folder(self, arm: str) -> Path:
        """Return the folder of an arm."""
        return self.out / "arms" / slug(arm)

    def keep_file(self, path: Path) -> None:
        """Copy the experiment's file to the results."""
        shutil.copyfile(path, self.out / "experiment.yaml")

    def keep(self, source: Source, cell: Cell, point: Point) -> None:
        """Keep the point of a cell, which completes it."""
        write_json(self.folder(source, cell) / "point.json", asdict(point))

    def point(self, source: Source, cell: Cell) -> Point | None:
        """Return the point of a complete cell; None for any other. Raises ExperimentError."""
        path = self.folder(source, cell) / "point.json"
        return _read(path) if path.exists() else None

    def points(self) -> Iterator[Point]:
        """Yield all points, real ones first, by arm, load and repeat."""
        for source in Source:
            points = (_read(path) for path in self.out.glob(f"{source.value}/*/point.json"))
            yield from sorted(points, key=lambda point: (point.arm.name, point.load, point.repeat))

    def failures(self) -> Iterator[str]:
        """Yield a line for each cell that failed."""
        for path in sorted(self.out.glob("*/*/failure.txt")):
            yield f"{path.parent.name}: {path.read_text(encoding='utf-8').strip()}"


def _read(path: Path) -> Point:
    try:
        return _POINT.validate_json(path.read_bytes())
    except ValidationError as error:
        raise ExperimentError(
            f"cannot read {path}: it was written by another version of kvrelay, or changed;"
            " measure again with `kvrelay experiment run`, into another folder or with --again"
        ) from error

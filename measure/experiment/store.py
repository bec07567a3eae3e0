"""Results of an experiment on disk, so that it can continue after a stop.

DIR/experiment.yaml             the experiment's file
DIR/settings.json               settings that all cells share, and each arm's settings
DIR/real/CELL/point.json        `Point`; a cell is complete once it has one
DIR/real/CELL/…                 raw data: run.json, requests.jsonl, samples.jsonl, report.html
DIR/real/CELL/failure.txt       why there is no point
DIR/simulated/CELL/…            the same for simulated arms; raw data: requests.jsonl
DIR/capacity/SOURCE/ARM.json    `ArmCapacity`
DIR/arms/ARM/                   serving.yaml and logs of its cluster, timing models of its workers
DIR/report.html
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from measure.experiment.capacity import ArmCapacity
from measure.experiment.points import Cell, Point, Source, slug
from measure.simulate.records import write_json

_POINT = TypeAdapter(Point)
_CAPACITY = TypeAdapter(ArmCapacity)


class Store:
    """An experiment's folder."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def folder(self, source: Source, cell: Cell) -> Path:
        """Return the folder of a cell."""
        return self.out / source.value / cell.name

    def arm_folder(self, arm: str) -> Path:
        """Return the folder of an arm."""
        return self.out / "arms" / slug(arm)

    def claim(self, ours: Mapping[str, Any]) -> tuple[str, ...]:
        """Keep settings; return the keys whose values differ from those of earlier results.

        New keys are added; nothing is kept when any value differs.
        """
        path = self.out / "settings.json"
        ours = json.loads(json.dumps(ours))
        theirs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        changed = tuple(sorted(key for key in ours if key in theirs and ours[key] != theirs[key]))
        if not changed:
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(path, {**theirs, **ours})
        return changed

    def keep_file(self, path: Path) -> None:
        """Copy the experiment's file to the results."""
        shutil.copyfile(path, self.out / "experiment.yaml")

    def forget(self) -> None:
        """Remove earlier results from the folder, and nothing else."""
        for name in (*(source.value for source in Source), "capacity", "arms"):
            shutil.rmtree(self.out / name, ignore_errors=True)
        (self.out / "settings.json").unlink(missing_ok=True)

    def begin(self, source: Source, cell: Cell) -> Path:
        """Return a cell's folder, emptied of earlier tries."""
        folder = self.folder(source, cell)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def keep(self, source: Source, cell: Cell, point: Point) -> None:
        """Keep the point of a cell, which completes it."""
        write_json(self.folder(source, cell) / "point.json", asdict(point))

    def keep_failure(self, source: Source, cell: Cell, reason: str) -> None:
        """Keep the reason why a cell has no point; the next run tries it again."""
        folder = self.folder(source, cell)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failure.txt").write_text(reason + "\n", encoding="utf-8")

    def drop(self, source: Source, cell: Cell) -> None:
        """Remove the files of an interrupted cell."""
        shutil.rmtree(self.folder(source, cell), ignore_errors=True)

    def point(self, source: Source, cell: Cell) -> Point | None:
        """Return the point of a complete cell; None for any other. Raises ValueError for an invalid file."""
        path = self.folder(source, cell) / "point.json"
        return _read_point(path) if path.exists() else None

    def points(self) -> Iterator[Point]:
        """Yield all points, real ones first, by arm, load and repeat."""
        for source in (Source.REAL, Source.SIMULATED):
            points = map(_read_point, self.out.glob(f"{source.value}/*/point.json"))
            yield from sorted(points, key=lambda point: (point.arm.name, point.load, point.repeat))

    def keep_capacity(self, capacity: ArmCapacity) -> None:
        """Keep the capacity of an arm."""
        write_json(self.out / "capacity" / capacity.source.value / f"{slug(capacity.arm.name)}.json", asdict(capacity))

    def capacities(self) -> Iterator[ArmCapacity]:
        """Yield all capacities, those of real arms first."""
        for source in (Source.REAL, Source.SIMULATED):
            for path in sorted(self.out.glob(f"capacity/{source.value}/*.json")):
                yield _CAPACITY.validate_json(path.read_text(encoding="utf-8"))

    def failures(self) -> Iterator[str]:
        """Yield a line for each cell that failed."""
        for path in sorted(self.out.glob("*/*/failure.txt")):
            yield f"{path.parent.name}: {path.read_text(encoding='utf-8').strip()}"


def _read_point(path: Path) -> Point:
    return _POINT.validate_json(path.read_text(encoding="utf-8"))

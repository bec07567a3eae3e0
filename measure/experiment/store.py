"""What an experiment keeps on disk, so that it can go on where it was stopped.

DIR/experiment.yaml             the file that it was run from
DIR/settings.json               what cells must have in common, and each arm's settings
DIR/real/CELL/point.json        `Point`; a cell is complete once it has one
DIR/real/CELL/…                 raw data: run.json, requests.jsonl, samples.jsonl, report.html
DIR/real/CELL/failure.txt       why there is no point
DIR/simulated/CELL/…            the same of simulated arms
DIR/capacity/SOURCE/ARM.json    `Capacity`
DIR/arms/ARM/                   serving.yaml and logs of its cluster, timing models of its workers
DIR/report.html
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from measure.experiment.capacity import Capacity
from measure.experiment.points import Point, Source

_POINT = TypeAdapter(Point)
_CAPACITY = TypeAdapter(Capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of an arm under a load."""

    arm: str
    """Its name."""
    load: float
    """Requests per second, in the mean."""
    repeat: int

    @property
    def name(self) -> str:
        """How its folder is called: unique, and fit for a file system."""
        return f"{slug(self.arm)}@{self.load:.6g}-r{self.repeat}"


class Store:
    """An experiment's folder."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def folder(self, source: Source, cell: Cell) -> Path:
        """Return where a cell's files are."""
        return self.out / source.value / cell.name

    def arm_folder(self, arm: str) -> Path:
        """Return where an arm's files are."""
        return self.out / "arms" / slug(arm)

    def claim(self, ours: Mapping[str, Any]) -> tuple[str, ...]:
        """Note settings, and return the keys whose values were others when results were made: those do not fit.

        Keys that are new are added; nothing is noted when any differs.
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
        """Copy the experiment's file, for whoever looks at the results."""
        shutil.copyfile(path, self.out / "experiment.yaml")

    def forget(self) -> None:
        """Remove earlier results from the folder, and nothing else that is in it."""
        for name in (*(source.value for source in Source), "capacity", "arms"):
            shutil.rmtree(self.out / name, ignore_errors=True)
        (self.out / "settings.json").unlink(missing_ok=True)

    def begin(self, source: Source, cell: Cell) -> Path:
        """Return a cell's folder, empty: an earlier try is removed."""
        folder = self.folder(source, cell)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def keep(self, source: Source, cell: Cell, point: Point) -> None:
        """Note that a cell is complete."""
        write_json(self.folder(source, cell) / "point.json", asdict(point))

    def keep_failure(self, source: Source, cell: Cell, reason: str) -> None:
        """Note why a cell has no point; it is tried again next time."""
        folder = self.folder(source, cell)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failure.txt").write_text(reason + "\n", encoding="utf-8")

    def drop(self, source: Source, cell: Cell) -> None:
        """Remove what a cell has left that was interrupted."""
        shutil.rmtree(self.folder(source, cell), ignore_errors=True)

    def point(self, source: Source, cell: Cell) -> Point | None:
        """Return a cell's point, if it is complete. Raises ValueError for a file that is none."""
        path = self.folder(source, cell) / "point.json"
        return _read_point(path) if path.exists() else None

    def points(self) -> Iterator[Point]:
        """Yield all points, real ones first, by arm, load and repeat."""
        for source in (Source.REAL, Source.SIMULATED):
            points = map(_read_point, self.out.glob(f"{source.value}/*/point.json"))
            yield from sorted(points, key=lambda point: (point.arm.name, point.load, point.repeat))

    def keep_capacity(self, capacity: Capacity) -> None:
        """Keep what an arm can serve."""
        write_json(self.out / "capacity" / capacity.source.value / f"{slug(capacity.arm.name)}.json", asdict(capacity))

    def capacities(self) -> Iterator[Capacity]:
        """Yield what was found, of real arms first."""
        for source in (Source.REAL, Source.SIMULATED):
            for path in sorted(self.out.glob(f"capacity/{source.value}/*.json")):
                yield _CAPACITY.validate_json(path.read_text(encoding="utf-8"))

    def failures(self) -> Iterator[str]:
        """Yield a line for each cell that failed."""
        for path in sorted(self.out.glob("*/*/failure.txt")):
            yield f"{path.parent.name}: {path.read_text(encoding='utf-8').strip()}"


def slug(text: str) -> str:
    """Return a name that is fit for a file system; different names stay different."""
    if re.fullmatch(r"[A-Za-z0-9+_=][A-Za-z0-9.=+_ -]*", text):
        return text.replace(" ", ",")
    clean = re.sub(r"[^A-Za-z0-9=+_]+", "-", text).strip("-")
    return f"{clean},{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def write_json(path: Path, value: object) -> None:
    """Write a file at once: whoever reads it finds all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def _read_point(path: Path) -> Point:
    return _POINT.validate_json(path.read_text(encoding="utf-8"))

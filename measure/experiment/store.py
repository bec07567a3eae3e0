"""Results of an experiment on disk, so that it can continue after a stop.

DIR/experiment.yaml             the experiment's file
DIR/settings.json               settings that all cells share, and each arm's settings
DIR/real/CELL/point.json        `Point`; a cell is complete once it has one
DIR/real/CELL/…                 raw data: run.json, requests.jsonl, samples.jsonl, report.html
DIR/real/CELL/failure.txt       why there is no point
DIR/simulated/CELL/…            the same for simulated arms; raw data: requests.jsonl, workers.json, clock.json
DIR/arms/ARM/                   serving.yaml and logs of its cluster, timing models of its workers
DIR/report.html
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from measure.experiment.points import Cell, Point, Source, slug
from measure.experiment.spec import ExperimentError
from measure.simulate.store import write_json

CLOCK_FILE = "clock.json"
"""Real times of a simulated run, which alone differ when it is repeated."""
_POINT = TypeAdapter(Point)


class OtherSettings(Exception):
    """A folder holds results of other settings; the message names them and what to do."""


class Store:
    """An experiment's folder."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def claim(self, ours: Mapping[str, Any]) -> None:
        """Keep settings; new keys are added to those of earlier results. Raises OtherSettings where values differ."""
        path = self.out / "settings.json"
        ours = json.loads(json.dumps(ours))
        theirs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        changed = sorted(key for key in ours if key in theirs and ours[key] != theirs[key])
        if changed:
            raise OtherSettings(
                f"{self.out} holds results of other settings ({', '.join(changed)} differ);"
                " name another folder with --out, or replace them with --again"
            )
        write_json(path, {**theirs, **ours})

    def forget(self) -> None:
        """Remove earlier results from the folder, and nothing else."""
        for part in (*Source, "arms"):
            shutil.rmtree(self.out / part, ignore_errors=True)
        (self.out / "settings.json").unlink(missing_ok=True)

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

    def choice_p50_us(self, point: Point) -> float:
        """Return the median real time of a choice of workers in a simulated cell."""
        clock = json.loads((self.folder(Source.SIMULATED, point.cell) / CLOCK_FILE).read_bytes())
        return float(clock["choice_p50_us"])

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

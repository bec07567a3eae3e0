"""Report of one part of the measurements: JSON for machines, a table for people."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_OUT = Path("benchmarks/results/cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One measured value, and what it is held against."""

    case: str
    value: float
    unit: str
    bound: float | None = None
    """Value of the same work on the hardware's bound, as measured in the same run, or in the other arm; same unit."""
    ratio: float | None = None
    """How good the value is: share of the bound, or advantage over the other arm. Higher is better."""
    goal: float | None = None
    """The least ratio that was asked for."""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the goal was reached; None without a goal."""
        return None if self.goal is None else self.ratio is not None and self.ratio >= self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that could not be measured, or a check that found something wrong."""

    case: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Report:
    """One part's outcome. The functions that measure append to it."""

    part: str
    title: str
    machine: str
    seconds: float = 0.0
    readings: list[Reading] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write `<part>.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.part}.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read what `save` wrote."""
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        raw["readings"] = [Reading(**reading) for reading in raw["readings"]]
        raw["failures"] = [Failure(**failure) for failure in raw["failures"]]
        return cls(**raw)

    def table(self) -> str:
        """Return the readings and failures for a terminal, as Markdown."""
        rows = [
            (
                reading.case,
                f"{_significant(reading.value)} {reading.unit}",
                "" if reading.bound is None else f"{_significant(reading.bound)} {reading.unit}",
                "" if reading.ratio is None else f"{reading.ratio:.2f}",
                _verdict(reading),
                reading.note,
            )
            for reading in self.readings
        ]
        lines = [f"## {self.title}", f"{self.machine}; {self.seconds:.0f} s", ""]
        if rows:
            lines += markdown_table(("case", "measured", "bound", "ratio", "goal", "note"), rows)
        lines += [f"FAILED {failure.case}: {failure.reason}" for failure in self.failures]
        return "\n".join(lines)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are padded to line up in plain text too."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(columns), line(["-" * width for width in widths]), *(line(row) for row in rows)]


def _verdict(reading: Reading) -> str:
    if reading.goal is None:
        return ""
    return f"{reading.goal:g} {'met' if reading.is_met else 'MISSED'}"


def _significant(value: float) -> str:
    """Return three significant digits, without an exponent; whole numbers as they are."""
    if value == 0 or not math.isfinite(value) or isinstance(value, int):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"

"""Figures of a benchmark: the values of all rounds, their medians with ranges, ratios between arms, tables."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from measure.pages.wording import number

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Figure:
    """One number of the report, with a value of each round."""

    part: str
    case: str
    arm: str
    unit: str
    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds)


class Figures:
    """All figures of a run, in order."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, str, str, str], Figure] = {}
        self.missing: dict[str, str] = {}
        """Reasons of arms that were left out."""

    def add(self, part: str, case: str, arm: str, **values: float) -> None:
        """Add one round's values; a value's name is its unit, with underscores for spaces."""
        for name, value in values.items():
            unit = name.replace("_", " ")
            figure = self.all.setdefault((part, case, arm, unit), Figure(part=part, case=case, arm=arm, unit=unit))
            figure.rounds.append(value)

    def extend(self, other: "Figures") -> None:
        """Add the rounds of other figures to these."""
        for figure in other.all.values():
            for value in figure.rounds:
                self.add(figure.part, figure.case, figure.arm, **{figure.unit: value})

    def leave_out(self, arm: str, reason: str) -> None:
        """Forget an arm's rounds: it failed before it had all of them."""
        self.all = {key: figure for key, figure in self.all.items() if figure.arm != arm}
        self.missing[arm] = reason

    def ratios(self, figure: Figure, base: str) -> list[float]:
        """Return a figure's ratio to the arm `base` in each round; empty for that arm and without a value there."""
        other = self.all.get((figure.part, figure.case, base, figure.unit))
        if other is None or other is figure:
            return []
        return [mine / theirs for mine, theirs in zip(figure.rounds, other.rounds, strict=True) if theirs]

    def tables(self, *, base: str | None = None) -> list[Table]:
        """Return a table for each part: a line for each case and arm, a column for each unit with median and range.

        With `base`, the name of an arm, the ratios to it stand beside the values.
        """
        return [self._table(part, base) for part in dict.fromkeys(figure.part for figure in self.all.values())]

    def _table(self, part: str, base: str | None) -> Table:
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for figure in self.all.values():
            if figure.part == part:
                cells = lines.setdefault((figure.case, figure.arm), {})
                cells[figure.unit] = spread(figure.rounds)
                if base is not None:
                    ratios = self.ratios(figure, base)
                    cells[f"{figure.unit} / {base}"] = spread(ratios) if ratios else ""
        units = list(dict.fromkeys(unit for cells in lines.values() for unit in cells))
        names = (Column(name, no_wrap=True) for name in ("case", "arm"))
        table = Table(*names, *units, title=part, title_justify="left")
        for (case, arm), cells in lines.items():
            table.add_row(case, arm, *(cells.get(unit, "") for unit in units))
        return table

    def show(self, console: Console, *, base: str | None = None) -> None:
        """Print the tables and the arms that are missing."""
        for table in self.tables(base=base):
            console.print(table)
        for arm, why in self.missing.items():
            console.print(f"[bold]{arm} was not measured[/bold]: {why}")

    def rows(self) -> list[dict[str, Any]]:
        """Return every figure with all rounds, for JSON."""
        return [asdict(figure) | {"median": figure.median} for figure in self.all.values()]


def spread(values: Sequence[float], *, scale: float = 1.0, percentiles: tuple[float, float] = (0, 100)) -> str:
    """Return the median with the range, or with two percentiles: "381 (367–389)"; one value stands alone."""
    low, middle, high = np.percentile(values, (percentiles[0], 50, percentiles[1])) * scale
    return number(middle, 4) + (f" ({number(low)}–{number(high)})" if len(values) > 1 else "")


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the value below which that share of the samples lies."""
    return float(np.quantile(samples, share))


def in_turn(arms: Sequence[_T], number: int) -> Sequence[_T]:
    """Return the arms in their order in a round: backwards in every other one, so that a drift hits all of them."""
    return arms if number % 2 == 0 else arms[::-1]


def wall_s(work: Callable[[], object]) -> float:
    """Return how long a call took."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def times_us(work: Callable[[], object], *, num_calls: int) -> list[float]:
    """Return how long each call took, in microseconds."""
    return [wall_s(work) * 1e6 for _ in range(num_calls)]

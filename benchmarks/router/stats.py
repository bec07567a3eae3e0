"""Samples and what is said of them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Figure:
    """One number of the report: a value of each round."""

    part: str
    case: str
    arm: str
    unit: str
    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)


class Figures:
    """All figures of a run, in order."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, str, str, str], Figure] = {}
        self.missing: dict[str, str] = {}
        """Why an arm was left out."""

    def add(self, part: str, case: str, arm: str, **values: float) -> None:
        """Add one round's values; a value's name is its unit, with underscores for spaces."""
        for unit, value in values.items():
            key = (part, case, arm, unit)
            figure = self.all.setdefault(key, Figure(part=part, case=case, arm=arm, unit=unit.replace("_", " ")))
            figure.rounds.append(value)


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the sample below which that share of them lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def times_us(work: Callable[[], object], *, num_calls: int) -> list[float]:
    """Return how long each call took, in microseconds."""
    samples: list[float] = []
    for _ in range(num_calls):
        started_s = time.perf_counter()
        work()
        samples.append((time.perf_counter() - started_s) * 1e6)
    return samples

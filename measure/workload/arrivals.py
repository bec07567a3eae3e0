"""Arrivals of sessions: renewal processes with a rate that may change over time.

Unit-rate arrivals are mapped to real time by the inverse of the cumulative rate, Λ⁻¹ (Çinlar, Introduction to
Stochastic Processes, 1975, for Poisson; Gerhardt and Nelson, Transforming Renewal Processes for Simulation of
Nonstationary Arrival Processes, INFORMS J. Computing 21, 2009, for others). The first interval is drawn from the
equilibrium distribution, so that Λ(t) arrivals are expected until any t, not only in the long run.
"""

import bisect
import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random


class Process(enum.StrEnum):
    """Variation of the intervals between arrivals."""

    POISSON = "poisson"
    """Exponential: independent sessions."""
    GAMMA = "gamma"
    """Gamma-distributed; see `burstiness`."""
    CONSTANT = "constant"


Point = tuple[float, float]
"""(second, arrivals per second)"""


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Arrivals per second as a function of time from 0 on."""

    points: tuple[Point, ...]
    """Points in order, the first at 0: linear in between, a jump between two at one second; the last rate stays."""
    _expected: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Expected arrivals before each point."""

    def __post_init__(self) -> None:
        areas = (self._area(place, after_s) for place, (after_s, _) in enumerate(self.points[1:]))
        object.__setattr__(self, "_expected", tuple(itertools.accumulate(areas, initial=0.0)))

    @classmethod
    def steps(cls, points: Sequence[Point]) -> "RateProfile":
        """Return a rate that jumps to that of each point."""
        held = [(second, rate) for (_, rate), (second, _) in itertools.pairwise(points)]
        return cls((points[0], *(point for pair in zip(held, points[1:], strict=True) for point in pair)))

    @property
    def changes_until_s(self) -> float:
        """Time from which the rate is constant."""
        return self.points[-1][0]

    @property
    def last_rate(self) -> float:
        """The rate from `changes_until_s` on."""
        return self.points[-1][1]

    def expected(self, until_s: float) -> float:
        """Return Λ, the expected number of arrivals from 0 to `until_s`."""
        place = bisect.bisect_right(self.points, until_s, key=lambda point: point[0]) - 1
        return self._expected[place] + self._area(place, until_s)

    def mean_rate(self, duration_s: float | None) -> float:
        """Return the mean rate over a time; None: until it is constant."""
        over_s = self.changes_until_s if duration_s is None else duration_s
        return self.expected(over_s) / over_s if over_s else self.last_rate

    def when(self, expected: float) -> float:
        """Return Λ⁻¹, the time until which `expected` arrivals are expected; infinite when there is none."""
        place = bisect.bisect_right(self._expected, expected) - 1
        (begin_s, rate), slope, rest = self.points[place], self._slope(place), expected - self._expected[place]
        # rest = rate·t + slope·t²/2, solved in the form without cancellation
        denominator = rate + math.sqrt(max(0.0, rate**2 + 2 * slope * rest))
        if not denominator:
            return begin_s if slope > 0 else math.inf
        when_s = begin_s + 2 * rest / denominator
        return when_s if place == len(self.points) - 1 else min(when_s, self.points[place + 1][0])

    def scaled(self, factor: float) -> "RateProfile":
        """Return the profile with all rates multiplied by `factor`."""
        return RateProfile(tuple((second, rate * factor) for second, rate in self.points))

    def _slope(self, place: int) -> float:
        """Return the change of the rate per second after a point; 0 at a jump and after the last one."""
        (begin_s, rate), (end_s, next_rate) = (*self.points, self.points[-1])[place : place + 2]
        return (next_rate - rate) / (end_s - begin_s) if end_s > begin_s else 0.0

    def _area(self, place: int, until_s: float) -> float:
        begin_s, rate = self.points[place]
        length_s = until_s - begin_s
        return rate * length_s + self._slope(place) * length_s**2 / 2


def arrival_times(profile: RateProfile, shape: float, random: Random) -> Iterator[float]:
    """Yield times in order, in seconds from 0; endless, unless the last rate is 0.

    Intervals are gamma-distributed before the rate stretches them: `shape` 1 is a Poisson process, with infinity all
    intervals are equal.
    """
    # equilibrium distribution: a uniform point in an interval chosen in proportion to its length
    is_even = shape == math.inf
    unit_s = random.random() * (1.0 if is_even else random.gammavariate(shape + 1.0, 1.0 / shape))
    while (when_s := profile.when(unit_s)) != math.inf:
        yield when_s
        unit_s += 1.0 if is_even else random.gammavariate(shape, 1.0 / shape)

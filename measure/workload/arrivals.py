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
from dataclasses import dataclass, field, replace
from random import Random


class Process(enum.StrEnum):
    """Variation of the intervals between arrivals."""

    POISSON = "poisson"
    """Exponential: independent sessions."""
    GAMMA = "gamma"
    """Gamma-distributed; see `burstiness`."""
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePiece:
    """A linear rate from `begin_s` to the next piece."""

    begin_s: float
    rate: float
    slope: float = 0.0
    """Change of the rate per second."""


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Arrivals per second as a function of time from 0 on: piecewise linear, the last piece constant."""

    pieces: tuple[RatePiece, ...]
    _expected: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Expected arrivals before each piece."""

    def __post_init__(self) -> None:
        areas = (_area(piece, after.begin_s - piece.begin_s) for piece, after in itertools.pairwise(self.pieces))
        object.__setattr__(self, "_expected", tuple(itertools.accumulate(areas, initial=0.0)))

    @classmethod
    def constant(cls, rate: float) -> "RateProfile":
        """Return a constant rate."""
        return cls((RatePiece(begin_s=0.0, rate=rate),))

    @classmethod
    def steps(cls, points: Sequence[tuple[float, float]]) -> "RateProfile":
        """Return a rate that jumps: (second, rate from then on), in order, the first at 0."""
        return cls(tuple(RatePiece(begin_s=second, rate=rate) for second, rate in points))

    @classmethod
    def ramp(cls, points: Sequence[tuple[float, float]]) -> "RateProfile":
        """Return a rate that is linear between points (second, rate), in order, the first at 0; the last rate stays."""
        pieces = [
            RatePiece(begin_s=begin_s, rate=rate, slope=(next_rate - rate) / (end_s - begin_s))
            for (begin_s, rate), (end_s, next_rate) in itertools.pairwise(points)
        ]
        return cls((*pieces, RatePiece(begin_s=points[-1][0], rate=points[-1][1])))

    @property
    def changes_until_s(self) -> float:
        """Time from which the rate is constant."""
        return self.pieces[-1].begin_s

    @property
    def last_rate(self) -> float:
        """The rate from `changes_until_s` on."""
        return self.pieces[-1].rate

    def expected(self, until_s: float) -> float:
        """Return Λ, the expected number of arrivals from 0 to `until_s`."""
        position = bisect.bisect_right(self.pieces, until_s, key=lambda piece: piece.begin_s) - 1
        piece = self.pieces[position]
        return self._expected[position] + _area(piece, until_s - piece.begin_s)

    def when(self, expected: float) -> float:
        """Return Λ⁻¹, the time until which `expected` arrivals are expected; infinite when there is none."""
        position = bisect.bisect_right(self._expected, expected) - 1
        piece, rest = self.pieces[position], expected - self._expected[position]
        # rest = rate·t + slope·t²/2, solved in the form without cancellation
        root = math.sqrt(max(0.0, piece.rate**2 + 2 * piece.slope * rest))
        denominator = piece.rate + root
        if not denominator:
            return piece.begin_s if piece.slope > 0 else math.inf
        when_s = piece.begin_s + 2 * rest / denominator
        is_last = position == len(self.pieces) - 1
        return when_s if is_last else min(when_s, self.pieces[position + 1].begin_s)

    def scaled(self, factor: float) -> "RateProfile":
        """Return the profile with all rates multiplied by `factor`."""
        return RateProfile(
            tuple(replace(piece, rate=piece.rate * factor, slope=piece.slope * factor) for piece in self.pieces)
        )


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


def _area(piece: RatePiece, length_s: float) -> float:
    return piece.rate * length_s + piece.slope * length_s**2 / 2

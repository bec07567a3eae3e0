"""Curves of the arms over the load, from the points of all repeats."""

import itertools
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measure.experiment.points import Arm, Point, Source
from measure.figures import Figures, Percentiles
from measure.load.estimates import Estimate

NUM_DRAWS = 1000

Draws = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All runs of an arm at one load."""

    load: float
    points: tuple[Point, ...]
    """Points by repeat; at least one."""
    goodput: Estimate
    """Good requests per second."""
    good_share: Estimate

    @property
    def num_requests(self) -> int:
        """Requests of all runs."""
        return sum(point.overall.num_requests for point in self.points)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of requests, `ALL` first."""
        return tuple(dict.fromkeys(kind for point in self.points for kind in point.kinds))

    def share_of(self, count: Callable[[Figures], int]) -> float:
        """Return a count as a share of all requests."""
        total = sum(count(point.overall) for point in self.points)
        return total / self.num_requests if self.num_requests else 0.0

    def mean_of(self, measure: Callable[[Point], float | None]) -> float | None:
        """Return the mean over the runs with a value; None without any."""
        values = [value for point in self.points if (value := measure(point)) is not None]
        return statistics.fmean(values) if values else None

    def p99(self, kind: str, pick: Callable[[Figures], Percentiles | None]) -> Estimate | None:
        """Return the mean of a kind's 99th percentile over the runs, with the smallest and the largest value."""
        values = [
            latency.p99
            for point in self.points
            if kind in point.kinds and (latency := pick(point.kinds[kind])) is not None
        ]
        return Estimate(value=statistics.fmean(values), low=min(values), high=max(values)) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCurve:
    """An arm at all its loads."""

    arm: Arm
    source: Source
    readings: tuple[Reading, ...]
    """Readings by load; at least one."""
    dispersion: float
    """Dispersion of all arms of the source, see `dispersion_of`."""

    @property
    def seed(self) -> int:
        """Seed of random draws, different for each arm, so that draws are independent."""
        return zlib.crc32(f"{self.source.value} {self.arm.name}".encode())

    def at(self, load: float) -> Reading | None:
        """Return the reading at a load; None if it was not measured."""
        return next((reading for reading in self.readings if reading.load == load), None)

    @property
    def peak(self) -> Reading:
        """Reading with the largest goodput."""
        return max(self.readings, key=lambda reading: reading.goodput.value)


def curves_of(points: Iterable[Point]) -> tuple[ArmCurve, ...]:
    """Return a curve for each arm and source, in the order of their first points."""
    groups: dict[tuple[Source, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.source, point.arm.name), []).append(point)
    dispersions = {
        source: dispersion_of([group for (of, _), group in groups.items() if of is source]) for source in Source
    }
    return tuple(_curve(group, dispersions[source]) for (source, _), group in groups.items())


def dispersion_of(arms: Iterable[Sequence[Point]]) -> float:
    """Return the ratio of the variance of counts to the binomial one; at least 1, and 1 when nothing was run twice.

    It is Pearson's statistic over all arms and loads that were run several times, divided by its degrees of freedom
    (quasi-likelihood, McCullagh and Nelder, 1989, section 4.5): independent requests would give 1.
    """
    chi_square, num_degrees = 0.0, 0
    for points in arms:
        for runs in _by_load(points):
            good = sum(run.overall.num_good for run in runs)
            total = sum(run.overall.num_requests for run in runs)
            if len(runs) > 1 and 0 < good < total:
                share = good / total
                chi_square += sum(
                    (run.overall.num_good - run.overall.num_requests * share) ** 2
                    / (run.overall.num_requests * share * (1 - share))
                    for run in runs
                    if run.overall.num_requests
                )
                num_degrees += len(runs) - 1
    return max(1.0, chi_square / num_degrees) if num_degrees else 1.0


def goodput_draws(points: Sequence[Point], *, seed: int, dispersion: float) -> Draws:
    """Return random draws [NUM_DRAWS] of the goodput of an arm at one load.

    The share of good requests is drawn from Jeffreys' posterior of the counts of all runs, divided by the dispersion;
    the rate of requests is that of the runs.
    """
    good, total, rate = _counts(points)
    good, total = good / dispersion, total / dispersion
    draws: Draws = rate * np.random.default_rng(seed).beta(good + 0.5, total - good + 0.5, size=NUM_DRAWS)
    return draws


def _counts(points: Sequence[Point]) -> tuple[float, float, float]:
    """Return good requests, all requests, and requests per second."""
    good = sum(point.overall.num_good for point in points)
    total = sum(point.overall.num_requests for point in points)
    seconds = sum(point.duration_s for point in points)
    return good, total, total / seconds if seconds else 0.0


def _by_load(points: Iterable[Point]) -> Iterable[list[Point]]:
    ordered = sorted(points, key=lambda point: (point.load, point.repeat))
    return (list(group) for _, group in itertools.groupby(ordered, key=lambda point: point.load))


def _curve(points: Sequence[Point], dispersion: float) -> ArmCurve:
    readings = tuple(_reading(group, dispersion) for group in _by_load(points))
    return ArmCurve(arm=points[0].arm, source=points[0].source, readings=readings, dispersion=dispersion)


def _reading(points: Sequence[Point], dispersion: float) -> Reading:
    good, total, rate = _counts(points)
    share = good / total if total else 0.0
    seed = zlib.crc32(f"{points[0].arm.name} {points[0].load!r}".encode())
    draws = goodput_draws(points, seed=seed, dispersion=dispersion)
    return Reading(
        load=points[0].load,
        points=tuple(points),
        goodput=Estimate.around(rate * share, draws),
        good_share=Estimate.around(share, draws / rate if rate else draws),
    )

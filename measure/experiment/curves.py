"""Curves of the arms over the load, from the points of all repeats.

Intervals are those of Jeffreys' posterior of the share of good requests: of independent requests, widened by how much
runs of one load differ (`_dispersion`).
"""

import itertools
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scipy.special import betaincinv

from measure.experiment.points import Arm, Point, Source
from measure.figures import Figures
from measure.load.estimates import CONFIDENCE, Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All runs of an arm at one load."""

    load: float
    points: tuple[Point, ...]
    """Points by repeat; at least one."""
    counted: tuple[Figures, ...]
    """Figures of the requests that count, of each run and wanted kind."""
    good_share: Estimate
    """Good requests of those that count."""
    goodput: Estimate
    """Good requests of all kinds per second."""

    @property
    def num_requests(self) -> int:
        """Requests that count."""
        return _sum(self.counted, "num_requests")

    @property
    def num_good(self) -> int:
        """Good requests of those that count."""
        return _sum(self.counted, "num_good")

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of requests, `ALL` first."""
        return tuple(dict.fromkeys(kind for point in self.points for kind in point.kinds))

    def share_of(self, count: str) -> float:
        """Return a count of `Figures` as a share of the requests that count."""
        return _sum(self.counted, count) / self.num_requests

    def mean_of(self, measure: Callable[[Point], float | None]) -> float | None:
        """Return the mean over the runs with a value; None without any."""
        values = [value for point in self.points if (value := measure(point)) is not None]
        return statistics.fmean(values) if values else None

    def latency(self, kind: str, name: str, percentile: str) -> Estimate | None:
        """Return the mean of a kind's percentile over the runs, with the smallest and the largest value."""
        known = [getattr(point.kinds[kind], name) for point in self.points if kind in point.kinds]
        values = [getattr(found, percentile) for found in known if found is not None]
        return Estimate(value=statistics.fmean(values), low=min(values), high=max(values)) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCurve:
    """An arm at all its loads."""

    arm: Arm
    source: Source
    readings: tuple[Reading, ...]
    """Readings by load; at least one, each with requests that count."""
    dispersion: float
    """Variance of counts by the binomial one, of all arms of the source; at least 1."""

    @property
    def seed(self) -> int:
        """Seed of random draws, different for each arm, so that draws are independent."""
        return zlib.crc32(f"{self.source.value} {self.arm.name}".encode())

    @property
    def peak(self) -> Reading:
        """Reading with the largest goodput."""
        return max(self.readings, key=lambda reading: reading.goodput.value)


def curves_of(points: Iterable[Point], kinds: tuple[str, ...] = ()) -> tuple[ArmCurve, ...]:
    """Return a curve for each arm and source, in the order of their first points.

    Only requests of `kinds` count; empty: all. Loads at which none came are left out.
    """
    groups: dict[tuple[Source, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.source, point.arm.name), []).append(point)
    loads = {key: _by_load(group, kinds) for key, group in groups.items()}
    curves = []
    for (source, name), runs in loads.items():
        peers = [each for (of, _), others in loads.items() if of is source for each in others]
        dispersion = _dispersion([[_counted(point, kinds) for point in each] for each in peers])
        if runs:
            readings = tuple(reading_of(each, kinds, dispersion=dispersion) for each in runs)
            arm = groups[source, name][0].arm
            curves.append(ArmCurve(arm=arm, source=source, readings=readings, dispersion=dispersion))
    return tuple(curves)


def reading_of(points: Sequence[Point], kinds: tuple[str, ...] = (), *, dispersion: float = 1.0) -> Reading:
    """Return the runs of an arm at one load together. At least one point, with requests that count."""
    counted = tuple(figures for point in points for figures in _counted(point, kinds))
    overall = [point.overall for point in points]
    seconds = sum(point.duration_s for point in points)
    rate = _sum(overall, "num_requests") / seconds if seconds else 0.0
    return Reading(
        load=points[0].load,
        points=tuple(points),
        counted=counted,
        good_share=_good_share(counted, dispersion),
        goodput=_good_share(overall, dispersion).scaled(rate),
    )


def has_counted(points: Iterable[Point], kinds: tuple[str, ...]) -> bool:
    """Return whether any request of `kinds` came; empty: of any kind."""
    return any(figures.num_requests for point in points for figures in _counted(point, kinds))


def _counted(point: Point, kinds: tuple[str, ...]) -> Sequence[Figures]:
    return [point.kinds[kind] for kind in kinds if kind in point.kinds] if kinds else (point.overall,)


def _by_load(points: Iterable[Point], kinds: tuple[str, ...]) -> list[list[Point]]:
    ordered = sorted(points, key=lambda point: (point.load, point.repeat))
    loads = (list(group) for _, group in itertools.groupby(ordered, key=lambda point: point.load))
    return [runs for runs in loads if has_counted(runs, kinds)]


def _dispersion(loads: Iterable[Sequence[Sequence[Figures]]]) -> float:
    """Return the ratio of the variance of counts to the binomial one; at least 1, and 1 when nothing was run twice.

    `loads` has the counts of every run at one load of one arm. The ratio is Pearson's statistic over all of them,
    divided by its degrees of freedom (quasi-likelihood, McCullagh and Nelder, 1989, section 4.5).
    """
    chi_square, num_degrees = 0.0, 0
    for runs in loads:
        counts = [(_sum(run, "num_good"), total) for run in runs if (total := _sum(run, "num_requests"))]
        share = sum(good for good, _ in counts) / sum(total for _, total in counts)
        if len(counts) > 1 and 0 < share < 1:
            chi_square += sum((good - total * share) ** 2 / (total * share * (1 - share)) for good, total in counts)
            num_degrees += len(counts) - 1
    return max(1.0, chi_square / num_degrees) if num_degrees else 1.0


def _good_share(counted: Iterable[Figures], dispersion: float) -> Estimate:
    figures = tuple(counted)
    good, total = _sum(figures, "num_good"), _sum(figures, "num_requests")
    tail = (1 - CONFIDENCE) / 2
    low, high = betaincinv(good / dispersion + 0.5, (total - good) / dispersion + 0.5, [tail, 1 - tail]).tolist()
    share = good / total
    return Estimate(value=share, low=min(low, share), high=max(high, share))


def _sum(counted: Iterable[Figures], count: str) -> int:
    return sum(getattr(figures, count) for figures in counted)

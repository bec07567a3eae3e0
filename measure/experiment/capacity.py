"""The highest load at which enough requests meet their objectives.

Two questions are kept apart. *Was this load served?* is asked run by run: the share of good requests of all runs at
that load, with Wilson's interval (E. B. Wilson, JASA 22, 1927); as soon as the interval is on one side of what is
wanted, no more runs are made. *How far can one go?* is asked of all loads together: more load cannot be served better,
so shares that rise with the load are noise, and are pooled (antitonic regression, by the number of requests). From a
first load the search doubles or halves until one load fails and one does not, and then halves the gap between them, as
a ratio. Where it ends in doubt the two loads are measured again: one that has failed by chance must not hide all that
lie above it.

The interval around the answer comes from Jeffreys' posterior of every load's share: drawn a thousand times and pooled
like the measured ones; between the last load that is served and the first that is not, the share passes anywhere. Both
intervals take requests for independent. Those of one run queue behind each other, so the intervals are the least that
has to be said of the uncertainty.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from measure.experiment.points import Arm, Point, Source
from measure.experiment.spec import CapacitySpec, ExperimentError
from measure.figures import Figures

_Z = 1.959964
"""Of 95 %."""
_NUM_DRAWS = 1000
_DOUBTFUL_REPEATS = 2
"""So many times as many runs where the search ends in doubt."""

Shares = npt.NDArray[np.float64]

Probe = Callable[[float, int], Point]
"""Measures a load (requests per second) for the n-th time, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLoad:
    """All runs at one load."""

    load: float
    num_requests: int
    num_good: int
    num_runs: int
    is_clear: bool
    """Whether the share's interval is on one side of what is wanted."""

    @property
    def good_share(self) -> float:
        """Good requests of all."""
        return self.num_good / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an arm can serve."""

    arm: Arm
    source: Source
    share: float
    """So many of the requests had to be good."""
    kinds: tuple[str, ...]
    """Of these kinds only; empty: of all."""
    load: float
    """The highest load that was measured and served; 0: none was."""
    low: float
    """95 % interval of the load at which the share of good requests falls below what is wanted."""
    high: float | None
    """None: not known, since the highest load that may be tried was served."""
    goodput_per_s: float
    """Good requests of all kinds per second at `load`."""
    probes: tuple[ProbedLoad, ...]
    """By load."""

    @property
    def goodput_per_worker(self) -> float:
        """The same by workers of both kinds."""
        return self.goodput_per_s / max(1, self.arm.num_workers)


def find_capacity(arm: Arm, source: Source, spec: CapacitySpec, *, start: float, probe: Probe) -> Capacity:
    """Search an arm's capacity from a first load. Raises ExperimentError, and whatever `probe` does."""
    search = _Search(spec, probe)
    search.run(start)
    probes = search.probes
    low, high = _interval(probes, spec.share)
    best = max(_served(probes, spec.share), default=0.0)
    return Capacity(
        arm=arm,
        source=source,
        share=spec.share,
        kinds=spec.kinds,
        load=best,
        low=min(low, best),  # which was measured
        high=high,
        goodput_per_s=search.goodput_per_s(best) if best else 0.0,
        probes=probes,
    )


def wilson(num_good: int, num_requests: int) -> tuple[float, float]:
    """Return the 95 % interval of a share. At least one request."""
    share, over = num_good / num_requests, _Z * _Z / num_requests
    middle = share + over / 2
    reach = _Z * math.sqrt(share * (1 - share) / num_requests + over / (4 * num_requests))
    return max(0.0, (middle - reach) / (1 + over)), min(1.0, (middle + reach) / (1 + over))


class _Search:
    """The loads that were tried."""

    def __init__(self, spec: CapacitySpec, probe: Probe) -> None:
        self._spec = spec
        self._probe = probe
        self._points: dict[float, list[Point]] = {}

    @property
    def probes(self) -> tuple[ProbedLoad, ...]:
        """By load."""
        return tuple(tally(load, self._points[load], self._spec) for load in sorted(self._points))

    def goodput_per_s(self, load: float) -> float:
        """Return the mean of the runs at a load."""
        return statistics.fmean(point.goodput_per_s for point in self._points[load])

    def run(self, start: float) -> None:
        """Measure until the gap between served and failed is small, and both of its ends are as sure as they get."""
        spec = self._spec
        self._measure(_rounded(min(max(start, spec.low), spec.high)), spec.repeats)
        while len(self._points) < spec.max_loads:
            probes = self.probes
            load = _next_load(probes, spec)
            if load is not None:
                self._measure(load, spec.repeats)
                continue
            doubtful = [each.load for each in _ends(probes, spec.share) if self._can_be_clearer(each)]
            if not doubtful:
                return
            for load in doubtful:
                self._measure(load, _DOUBTFUL_REPEATS * spec.repeats)

    def _can_be_clearer(self, probe: ProbedLoad) -> bool:
        return not probe.is_clear and probe.num_runs < _DOUBTFUL_REPEATS * self._spec.repeats

    def _measure(self, load: float, num_runs: int) -> None:
        points = self._points.setdefault(load, [])
        while len(points) < num_runs:
            points.append(self._probe(load, len(points)))
            if tally(load, points, self._spec).is_clear:
                return


def tally(load: float, points: Sequence[Point], spec: CapacitySpec) -> ProbedLoad:
    """Return what the runs at one load say together. Raises ExperimentError when none of their requests count."""
    counted = [kind for point in points for kind in _counted(point, spec.kinds)]
    num_requests = sum(kind.num_requests for kind in counted)
    num_good = sum(kind.num_good for kind in counted)
    if not num_requests:
        asked = f"of the kinds {', '.join(spec.kinds)} " if spec.kinds else ""
        raise ExperimentError(f"no request {asked}was sent at {load:g}/s: measure longer, or at higher loads")
    low, high = wilson(num_good, num_requests)
    return ProbedLoad(
        load=load,
        num_requests=num_requests,
        num_good=num_good,
        num_runs=len(points),
        is_clear=low >= spec.share or high < spec.share,
    )


def _counted(point: Point, kinds: tuple[str, ...]) -> Sequence[Figures]:
    if not kinds:
        return (point.overall,)
    unknown = [kind for kind in kinds if kind not in point.kinds]
    if unknown:
        raise ExperimentError(f"capacity.kinds: no stream sends {unknown[0]!r}; there are {', '.join(point.kinds)}")
    return [point.kinds[kind] for kind in kinds]


def _next_load(probes: Sequence[ProbedLoad], spec: CapacitySpec) -> float | None:
    served = _served(probes, spec.share)
    failed = [probe.load for probe in probes[len(served) :]]
    if not failed:
        return _rounded(min(spec.high, 2 * served[-1])) if served[-1] < spec.high else None
    if not served:
        return _rounded(max(spec.low, failed[0] / 2)) if failed[0] > spec.low else None
    if failed[0] <= served[-1] * (1 + spec.precision):
        return None
    return _rounded(math.sqrt(served[-1] * failed[0]))


def _ends(probes: Sequence[ProbedLoad], share: float) -> Sequence[ProbedLoad]:
    """Return the highest load that was served and the lowest one that was not."""
    num_served = len(_served(probes, share))
    return probes[max(0, num_served - 1) : num_served + 1]


def _served(probes: Sequence[ProbedLoad], share: float) -> list[float]:
    """Return the loads that were served, ascending; all below the others, by the pooled shares."""
    pooled = _pooled(np.array([probe.good_share for probe in probes]), probes)
    return [probe.load for probe, value in zip(probes, pooled, strict=True) if value >= share]


def _interval(probes: Sequence[ProbedLoad], share: float) -> tuple[float, float | None]:
    ends = crossing_draws(probes, share)
    low, high = np.quantile(ends, [0.025, 0.975], method="inverted_cdf")  # of draws: some may be infinite
    return float(low), None if math.isinf(high) else float(high)


def crossing_draws(probes: Sequence[ProbedLoad], share: float, *, seed: int = 0, dispersion: float = 1.0) -> Shares:
    """Return draws [1000] of the load at which the share of good requests falls below `share`.

    0: below the lowest load; infinite: above the highest. `probes` by load, at least one. Draws of two arms are
    independent when their seeds differ. `dispersion`: so many requests tell no more than one that is independent of all
    others.
    """
    good = np.array([probe.num_good for probe in probes]) / dispersion
    bad = np.array([probe.num_requests for probe in probes]) / dispersion - good
    rng = np.random.default_rng(seed)
    draws = rng.beta(good + 0.5, bad + 0.5, size=(_NUM_DRAWS, len(probes)))
    gaps = np.array([_gap(probes, _pooled(shares, probes), share) for shares in draws])
    # How the share falls between two loads nobody has seen: it may pass anywhere between them.
    places: Shares = gaps[:, 0] + (gaps[:, 1] - gaps[:, 0]) * (1 - rng.random(_NUM_DRAWS))
    return places


def crossing(probes: Sequence[ProbedLoad], share: float) -> float:
    """Return the likeliest such load by the measured shares: between two loads in proportion."""
    pooled = _pooled(np.array([probe.good_share for probe in probes]), probes)
    before, after = _gap(probes, pooled, share)
    shares = {probe.load: value for probe, value in zip(probes, pooled, strict=True)}
    if before == 0 or math.isinf(after):
        return 0.0 if before == 0 else math.inf
    return before + (after - before) * float((shares[before] - share) / (shares[before] - shares[after]))


def _gap(probes: Sequence[ProbedLoad], pooled: Shares, share: float) -> tuple[float, float]:
    """Return the loads between which shares that fall with the load pass `share`.

    (0, 0): they are below it from the first load on. The last load and infinity: they never are.
    """
    num_served = int(np.count_nonzero(pooled >= share))
    if num_served == 0:
        return 0.0, 0.0
    return probes[num_served - 1].load, probes[num_served].load if num_served < len(probes) else math.inf


def _pooled(shares: Shares, probes: Sequence[ProbedLoad]) -> Shares:
    """Return the shares that never rise with the load and are nearest to the given ones."""
    weights = [probe.num_requests for probe in probes]
    # A mean of shares that are all 99/100 must not come out as a hair less.
    pooled: Shares = isotonic_regression(shares, weights=weights, increasing=False).x.round(12)
    return pooled


def _rounded(load: float) -> float:
    """Return a load with four digits: a name for it that people can read."""
    return float(f"{load:.4g}")

"""The highest load at which enough requests meet their objectives.

Two questions are kept apart. *Was this load served?* is answered run by run: by the share of good requests of all runs
at that load, with Wilson's interval (E. B. Wilson, JASA 22, 1927); no more runs are made once the interval is on one
side of the wanted share. *What is the highest load?* is answered from all loads together: more load cannot be served
better, so shares that rise with the load are noise, and are pooled (antitonic regression, by the number of requests).
From a first load the search doubles or halves until one load fails and one does not, and then halves the gap between
them, as a ratio. Loads that are in doubt at the end are measured again: one that failed by chance must not hide all
higher ones.

The interval of the answer comes from Jeffreys' posterior of every load's share, drawn a thousand times and pooled like
the measured shares; between the last load that is served and the first that is not, the share crosses anywhere. Both
intervals assume independent requests. Requests of one run queue behind each other, so the true uncertainty is larger.
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
from measure.load.estimates import Estimate, wilson

_NUM_DRAWS = 1000
_DOUBTFUL_REPEATS = 2
"""Factor on the number of runs at loads that are in doubt at the end."""

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
    """Whether the share's interval is on one side of the wanted share."""

    @property
    def good_share(self) -> float:
        """Good requests of all."""
        return self.num_good / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCapacity:
    """Capacity of an arm."""

    arm: Arm
    source: Source
    share: float
    """Share of the requests that had to be good."""
    kinds: tuple[str, ...]
    """Kinds of requests that count; empty: all."""
    load: float
    """Highest load that was measured and served; 0: none."""
    low: float
    """Lower end of the 95 % interval of the load at which the share of good requests falls below the wanted one."""
    high: float | None
    """Upper end; None: unknown, since the highest allowed load was served."""
    goodput_per_s: float
    """Good requests of all kinds per second at `load`."""
    probes: tuple[ProbedLoad, ...]
    """Ordered by load."""

    @property
    def goodput_per_worker(self) -> float:
        """Good requests per second and worker of either kind."""
        return self.goodput_per_s / max(1, self.arm.num_workers)


def find_capacity(arm: Arm, source: Source, spec: CapacitySpec, *, start: float, probe: Probe) -> ArmCapacity:
    """Search an arm's capacity from a first load. Raises ExperimentError, and what `probe` raises."""
    search = _Search(spec, probe)
    search.run(start)
    probes = search.probes
    best = max(_served(probes, spec.share), default=0.0)
    limit = Estimate.around(best, crossing_draws(probes, spec.share))
    return ArmCapacity(
        arm=arm,
        source=source,
        share=spec.share,
        kinds=spec.kinds,
        load=best,
        low=limit.low,
        high=None if math.isinf(limit.high) else limit.high,
        goodput_per_s=search.goodput_per_s(best) if best else 0.0,
        probes=probes,
    )


class _Search:
    """Loads that were tried."""

    def __init__(self, spec: CapacitySpec, probe: Probe) -> None:
        self._spec = spec
        self._probe = probe
        self._points: dict[float, list[Point]] = {}

    @property
    def probes(self) -> tuple[ProbedLoad, ...]:
        """All tried loads, ascending."""
        return tuple(tally(load, self._points[load], self._spec) for load in sorted(self._points))

    def goodput_per_s(self, load: float) -> float:
        """Return the mean goodput of the runs at a load."""
        return statistics.fmean(point.goodput_per_s for point in self._points[load])

    def run(self, start: float) -> None:
        """Measure until the gap between served and failed loads is small, and both ends are as clear as they get."""
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
    """Return the runs at one load together. Raises ExperimentError when none of their requests count."""
    counted = [kind for point in points for kind in _counted(point, spec.kinds)]
    num_requests = sum(kind.num_requests for kind in counted)
    num_good = sum(kind.num_good for kind in counted)
    if not num_requests:
        asked = f"of the kinds {', '.join(spec.kinds)} " if spec.kinds else ""
        raise ExperimentError(f"no request {asked}was sent at {load:g}/s: measure longer, or at higher loads")
    good_share = wilson(num_good / num_requests, num_requests)
    return ProbedLoad(
        load=load,
        num_requests=num_requests,
        num_good=num_good,
        num_runs=len(points),
        is_clear=good_share.low >= spec.share or good_share.high < spec.share,
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
    """Return the highest load that was served and the lowest that was not."""
    num_served = len(_served(probes, share))
    return probes[max(0, num_served - 1) : num_served + 1]


def _served(probes: Sequence[ProbedLoad], share: float) -> list[float]:
    """Return the loads that were served by the pooled shares, ascending; all are below the others."""
    pooled = _pooled(np.array([probe.good_share for probe in probes]), probes)
    return [probe.load for probe, value in zip(probes, pooled, strict=True) if value >= share]


def crossing_draws(probes: Sequence[ProbedLoad], share: float, *, seed: int = 0, dispersion: float = 1.0) -> Shares:
    """Return draws [1000] of the load at which the share of good requests falls below `share`.

    0: below the lowest load; infinite: above the highest. `probes` by load, at least one. Draws of two arms are
    independent when their seeds differ. `dispersion`: number of requests that tell as much as one independent one.
    """
    good = np.array([probe.num_good for probe in probes]) / dispersion
    bad = np.array([probe.num_requests for probe in probes]) / dispersion - good
    rng = np.random.default_rng(seed)
    draws = rng.beta(good + 0.5, bad + 0.5, size=(_NUM_DRAWS, len(probes)))
    gaps = np.array([_gap(probes, _pooled(shares, probes), share) for shares in draws])
    # The share between two loads is unknown: it may cross anywhere.
    places: Shares = gaps[:, 0] + (gaps[:, 1] - gaps[:, 0]) * (1 - rng.random(_NUM_DRAWS))
    return places


def crossing(probes: Sequence[ProbedLoad], share: float) -> float:
    """Return the likeliest such load by the measured shares, interpolated between two loads."""
    pooled = _pooled(np.array([probe.good_share for probe in probes]), probes)
    before, after = _gap(probes, pooled, share)
    shares = {probe.load: value for probe, value in zip(probes, pooled, strict=True)}
    if before == 0 or math.isinf(after):
        return 0.0 if before == 0 else math.inf
    return before + (after - before) * float((shares[before] - share) / (shares[before] - shares[after]))


def _gap(probes: Sequence[ProbedLoad], pooled: Shares, share: float) -> tuple[float, float]:
    """Return the loads between which shares that fall with the load cross `share`.

    (0, 0): they are below it from the first load on. The last load and infinity: they never are.
    """
    num_served = int(np.count_nonzero(pooled >= share))
    if num_served == 0:
        return 0.0, 0.0
    return probes[num_served - 1].load, probes[num_served].load if num_served < len(probes) else math.inf


def _pooled(shares: Shares, probes: Sequence[ProbedLoad]) -> Shares:
    """Return the nearest shares that never rise with the load."""
    weights = [probe.num_requests for probe in probes]
    # The mean of equal shares must equal them exactly.
    pooled: Shares = isotonic_regression(shares, weights=weights, increasing=False).x.round(12)
    return pooled


def _rounded(load: float) -> float:
    """Return a load with four digits, as a readable name."""
    return float(f"{load:.4g}")

"""The highest load at which enough requests are good, and the loads by which a search finds it.

All loads of an arm are judged together: more load cannot be served better, so shares that rise with the load are noise,
and are pooled (antitonic regression, by the number of requests). The interval comes from Jeffreys' posterior of every
load's share, drawn a thousand times and pooled likewise; between the last load that is served and the first that is
not, the share crosses anywhere.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import isotonic_regression

from measure.experiment.curves import ArmCurve, Reading, has_counted, reading_of
from measure.experiment.points import Point
from measure.experiment.spec import CapacitySpec, ExperimentError
from measure.load.estimates import Estimate, Floats
from measure.pages.wording import number, rate

_NUM_DRAWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Load at which the share of good requests of an arm falls below the wanted one."""

    load: float
    """Requests per second, interpolated between the measured loads; 0 below the lowest, infinite above the highest."""
    low: float
    """Lower end of the 95 % interval; 0: it may be below every measured load."""
    high: float | None
    """Upper end; None: it may be above every measured load."""
    highest: float
    """Highest measured load."""
    draws: Floats = field(compare=False)
    """Random draws of `load`."""

    @property
    def is_bracketed(self) -> bool:
        """Whether some load was served and another was not."""
        return 0 < self.load < math.inf

    def __str__(self) -> str:
        if self.load == 0:
            return "less than the lowest load"
        if math.isinf(self.load):
            return f"more than {rate(self.highest)}, the highest load (95 %: at least {number(self.low)})"
        return f"{rate(self.load)} (95 %: {number(self.low)} to {'more' if self.high is None else number(self.high)})"


def capacity_of(curve: ArmCurve, *, share: float) -> Capacity:
    """Return the capacity of an arm for a wanted share of good requests."""
    load, draws = _crossing(curve.readings, share), _crossing_draws(curve, share)
    bounds, highest = Estimate.around(load, draws), curve.readings[-1].load
    return Capacity(
        load=load,
        low=min(bounds.low, highest),
        high=None if math.isinf(bounds.high) else bounds.high,
        highest=highest,
        draws=draws,
    )


def searched_loads(start: float, spec: CapacitySpec, runs_at: Callable[[float], Sequence[Point]]) -> Iterator[float]:
    """Yield the loads of a search from `start`, each to be run before the next one; ends when a run failed.

    `runs_at`: returns the points of a load. Raises ExperimentError.
    """
    load: float | None = start
    readings: list[Reading] = []
    while load is not None and len(readings) < spec.max_loads:
        yield load
        runs = runs_at(load)
        if len(runs) < spec.repeats:
            return
        if not has_counted(runs, spec.kinds):
            raise ExperimentError(f"no request that counts was sent at {load:g}/s: measure longer, or at higher loads")
        readings = sorted([*readings, reading_of(runs, spec.kinds)], key=lambda reading: reading.load)
        load = _next_load(readings, spec)


def first_load(num_workers: int, spec: CapacitySpec, *, default: float) -> float:
    """Return the load with which a search begins, for an arm of so many workers."""
    load = default if spec.start is None else spec.start
    if spec.start_per_worker is not None:
        load = spec.start_per_worker * num_workers
    return _rounded(min(max(load, spec.low), spec.high))


def _next_load(readings: Sequence[Reading], spec: CapacitySpec) -> float | None:
    """Return the load that a search measures next; None at its end. `readings` by load, at least one.

    The load doubles or halves until one load is served and one is not; then the gap between them is halved, as a ratio.
    """
    num_served = _num_served(_pooled(_shares(readings), readings), spec.share)
    served, failed = readings[:num_served], readings[num_served:]
    if not failed:
        return _rounded(min(spec.high, 2 * served[-1].load)) if served[-1].load < spec.high else None
    if not served:
        return _rounded(max(spec.low, failed[0].load / 2)) if failed[0].load > spec.low else None
    if failed[0].load <= served[-1].load * (1 + spec.precision):
        return None
    return _rounded(math.sqrt(served[-1].load * failed[0].load))


def _crossing(readings: Sequence[Reading], share: float) -> float:
    """Return the likeliest capacity by the measured shares, interpolated between two loads."""
    pooled = _pooled(_shares(readings), readings)
    num_served = _num_served(pooled, share)
    if num_served in (0, len(readings)):
        return math.inf if num_served else 0.0
    (last, first), (above, below) = readings[num_served - 1 : num_served + 1], pooled[num_served - 1 : num_served + 1]
    return last.load + (first.load - last.load) * float((above - share) / (above - below))


def _crossing_draws(curve: ArmCurve, share: float) -> Floats:
    readings = curve.readings
    good = np.array([reading.num_good for reading in readings]) / curve.dispersion
    bad = np.array([reading.num_requests for reading in readings]) / curve.dispersion - good
    rng = np.random.default_rng(curve.seed)
    draws = rng.beta(good + 0.5, bad + 0.5, size=(_NUM_DRAWS, len(readings)))
    num_served = np.array([_num_served(_pooled(shares, readings), share) for shares in draws])
    loads = np.array([0.0, *(reading.load for reading in readings), math.inf])
    last, first = loads[num_served], np.where(num_served > 0, loads[num_served + 1], 0.0)
    # The share between two loads is unknown: it may cross anywhere.
    return np.asarray(last + (first - last) * (1 - rng.random(_NUM_DRAWS)))


def _shares(readings: Sequence[Reading]) -> Floats:
    return np.array([reading.good_share.value for reading in readings])


def _pooled(shares: Floats, readings: Sequence[Reading]) -> Floats:
    """Return the nearest shares that never rise with the load."""
    weights = [reading.num_requests for reading in readings]
    # The mean of equal shares must equal them exactly.
    pooled: Floats = isotonic_regression(shares, weights=weights, increasing=False).x.round(12)
    return pooled


def _num_served(pooled: Floats, share: float) -> int:
    return int(np.count_nonzero(pooled >= share))


def _rounded(load: float) -> float:
    """Return a load with four digits, as a readable name."""
    return float(f"{load:.4g}")

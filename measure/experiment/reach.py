"""Reach of an arm: its capacity with an interval, and the load from which goodput stays below the load."""

import math
from dataclasses import dataclass

import numpy as np

from measure.experiment.capacity import ArmCapacity, ProbedLoad, crossing, crossing_draws, crossing_interval, tally
from measure.experiment.curves import Curve, Draws
from measure.experiment.spec import CapacitySpec

KNEE_SHARE = 0.95
"""Share of the load that is served well at the knee."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReach:
    """Highest load at which enough requests are good."""

    load: float
    """Requests per second, interpolated between the measured loads."""
    low: float
    """Lower end of the 95 % interval; 0: it may be below every measured load."""
    high: float | None
    """Upper end; None: it may be above every measured load."""
    num_units: int
    """Workers of the arm, or threads of all its workers."""
    highest: float
    """Highest measured load."""
    draws: Draws
    """Random draws of the reach; 0 below the lowest measured load, infinite above the highest."""
    is_searched: bool
    """Whether the loads were chosen by a search."""

    @property
    def per_unit(self) -> float:
        """Reach per worker or thread."""
        return self.load / self.num_units

    @property
    def is_bracketed(self) -> bool:
        """Whether some load was served and another was not."""
        return 0 < self.load < math.inf


def reach_of(
    curve: Curve,
    *,
    share: float,
    num_units: int,
    kinds: tuple[str, ...] = (),
    found: ArmCapacity | None = None,
) -> LoadReach:
    """Return an arm's reach, from a search where there was one, else from its curve. Raises ExperimentError.

    `kinds`: only their requests count; empty: all.
    """
    spec = CapacitySpec(share=share, kinds=kinds)
    probes = _probes(curve, spec) if found is None else found.probes
    draws = crossing_draws(probes, share, seed=curve.seed, dispersion=curve.dispersion)
    low, high = crossing_interval(draws)
    load = crossing(probes, share)
    return LoadReach(
        load=load,
        low=min(low, load, probes[-1].load),
        high=None if math.isinf(max(high, load)) else max(high, load),
        num_units=num_units,
        highest=probes[-1].load,
        draws=draws,
        is_searched=found is not None,
    )


def knee_of(curve: Curve) -> float | None:
    """Return the load from which less than `KNEE_SHARE` of the requests are good; None if unknown."""
    knee = crossing(_probes(curve, CapacitySpec()), KNEE_SHARE)
    return knee if 0 < knee < math.inf else None


def _probes(curve: Curve, spec: CapacitySpec) -> tuple[ProbedLoad, ...]:
    return tuple(tally(reading.load, reading.points, spec) for reading in curve.readings)


def sure_of(draws: Draws) -> float:
    """Return the share of draws above 0; ties count half."""
    return float(np.mean(draws > 0) + np.mean(draws == 0) / 2)


def gain_draws(ours: LoadReach, theirs: LoadReach) -> Draws:
    """Return draws of log(our reach / their reach); 0 where both are above, or both below, all measured loads."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(ours.draws) - np.log(theirs.draws)
    known: Draws = np.nan_to_num(logs, nan=0.0, posinf=math.inf, neginf=-math.inf)
    return known

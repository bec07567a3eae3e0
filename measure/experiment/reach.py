"""How far an arm can go: its capacity with the uncertainty of that, and where its goodput leaves the load."""

import math
from dataclasses import dataclass

import numpy as np

from measure.experiment.capacity import Capacity, crossing, crossing_draws, tally
from measure.experiment.curves import Curve, Draws
from measure.experiment.spec import CapacitySpec

KNEE_SHARE = 0.95
"""The knee is where this share of the load is still served well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The highest load of which enough requests are good."""

    load: float
    """Requests per second: between the loads that were measured, in proportion."""
    low: float
    """95 % interval. 0: it may be below every load that was measured."""
    high: float | None
    """None: it may be above every load that was measured."""
    num_units: int
    """Workers, or threads of all workers: what arms are compared by."""
    highest: float
    """The highest load that was measured."""
    draws: Draws
    """As good as what was measured; 0 below the lowest load, infinite above the highest."""
    is_searched: bool
    """Whether loads were chosen to find it."""

    @property
    def per_unit(self) -> float:
        """For each of the arm's workers or threads."""
        return self.load / self.num_units

    @property
    def is_bracketed(self) -> bool:
        """Whether some load was served and some was not."""
        return 0 < self.load < math.inf


def reach_of(
    curve: Curve,
    *,
    share: float,
    num_units: int,
    kinds: tuple[str, ...] = (),
    found: Capacity | None = None,
) -> Reach:
    """Return an arm's reach, from a search where there was one, else from its curve. Raises ExperimentError.

    `kinds`: only their requests count; empty: all.
    """
    spec = CapacitySpec(share=share, kinds=kinds)
    probes = (
        tuple(tally(reading.load, reading.points, spec) for reading in curve.readings)
        if found is None
        else found.probes
    )
    draws = crossing_draws(probes, share, seed=curve.seed, dispersion=curve.dispersion)
    low, high = (float(each) for each in np.quantile(draws, [0.025, 0.975], method="inverted_cdf"))
    load = crossing(probes, share)
    return Reach(
        load=load,
        low=min(low, load, probes[-1].load),
        high=None if math.isinf(max(high, load)) else max(high, load),
        num_units=num_units,
        highest=probes[-1].load,
        draws=draws,
        is_searched=found is not None,
    )


def knee_of(curve: Curve) -> float | None:
    """Return the load from which on less than `KNEE_SHARE` of what is asked is served well; None when none is known."""
    probes = tuple(tally(reading.load, reading.points, CapacitySpec()) for reading in curve.readings)
    knee = crossing(probes, KNEE_SHARE)
    return knee if 0 < knee < math.inf else None


def sure_of(draws: Draws) -> float:
    """Return how many of the draws are above 0; ties count half."""
    return float(np.mean(draws > 0) + np.mean(draws == 0) / 2)


def gain_draws(ours: Reach, theirs: Reach) -> Draws:
    """Return draws of log(our reach / their reach), by which one is known to be the larger.

    Where both are above, or both below, what was measured, nothing is known: 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(ours.draws) - np.log(theirs.draws)
    known: Draws = np.nan_to_num(logs, nan=0.0, posinf=math.inf, neginf=-math.inf)
    return known

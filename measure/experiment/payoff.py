"""Reach of an arm, its capacity with an interval; and whether a split pays against as many aggregated workers."""

import enum
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from measure.experiment.capacity import ArmCapacity, ProbedLoad, crossing, crossing_draws, tally
from measure.experiment.curves import ArmCurve, Draws, Reading, goodput_draws
from measure.experiment.points import Arm
from measure.experiment.spec import CapacitySpec
from measure.load.estimates import CONFIDENCE, Estimate
from measure.pages.wording import number, rate

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
    """Workers of the arm, threads of all its workers, or 1; see `MeanUnit`."""
    highest: float
    """Highest measured load."""
    draws: Draws
    """Random draws of the reach; 0 below the lowest measured load, infinite above the highest."""
    is_searched: bool
    """Whether the loads were chosen by a search."""

    @property
    def per_unit(self) -> float:
        """Reach per unit."""
        return self.load / self.num_units

    @property
    def is_bracketed(self) -> bool:
        """Whether some load was served and another was not."""
        return 0 < self.load < math.inf


def reach_text(reach: LoadReach) -> str:
    """Return a reach with its interval."""
    if reach.load == 0:
        return "less than the lowest load"
    if math.isinf(reach.load):
        return f"more than {rate(reach.highest)}, the highest load (95 %: at least {number(reach.low)})"
    high = "more" if reach.high is None else number(reach.high)
    return f"{rate(reach.load)} (95 %: {number(reach.low)} to {high})"


def reach_of(
    curve: ArmCurve,
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
    load = crossing(probes, share)
    bounds = Estimate.around(load, draws)
    return LoadReach(
        load=load,
        low=min(bounds.low, probes[-1].load),
        high=None if math.isinf(bounds.high) else bounds.high,
        num_units=num_units,
        highest=probes[-1].load,
        draws=draws,
        is_searched=found is not None,
    )


def knee_of(curve: ArmCurve) -> float | None:
    """Return the load from which less than `KNEE_SHARE` of the requests are good; None if unknown."""
    knee = crossing(_probes(curve, CapacitySpec()), KNEE_SHARE)
    return knee if 0 < knee < math.inf else None


def _probes(curve: ArmCurve, spec: CapacitySpec) -> tuple[ProbedLoad, ...]:
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


class Verdict(enum.StrEnum):
    """Outcome of a comparison."""

    MORE = "more"
    LESS = "less"
    UNCLEAR = "cannot tell"

    @classmethod
    def of(cls, draws: Draws) -> "Verdict":
        """Return on which side of 0 at least 97.5 % of the draws of a difference are."""
        sure, tail = sure_of(draws), (1 - CONFIDENCE) / 2
        if sure >= 1 - tail:
            return cls.MORE
        return cls.LESS if sure <= tail else cls.UNCLEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReach:
    """An arm and its reach."""

    curve: ArmCurve
    reach: LoadReach

    @property
    def arm(self) -> Arm:
        """Arm of the curve."""
        return self.curve.arm


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLoad:
    """Two arms under one load."""

    load: float
    difference: Estimate
    """Difference of goodput, requests per second."""
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """Gain of splitting prefill from decode with equal resources."""

    num_workers: int
    """Workers of the split arm."""
    split: ArmReach
    """Best split arm of that size."""
    whole: ArmReach
    """Best aggregated arm."""
    ratio: Estimate | None
    """Reach of the split arm by that of the aggregated one; None if either is unknown."""
    verdict: Verdict
    loads: tuple[AtLoad, ...]
    """Loads at which both were measured, ascending."""

    @property
    def flips(self) -> tuple[tuple[AtLoad, AtLoad], ...]:
        """Neighbouring loads between which the verdict turns around; unclear loads are skipped."""
        told = [each for each in self.loads if each.verdict is not Verdict.UNCLEAR]
        return tuple((before, after) for before, after in itertools.pairwise(told) if before.verdict != after.verdict)


def payoffs_of(arms: Iterable[ArmReach]) -> tuple[Payoff, ...]:
    """Return a comparison for each number of workers with both kinds of arms, ascending."""
    ours = [each for each in arms if not each.arm.is_external]
    splits = [each for each in ours if each.arm.num_prefill]
    wholes = [each for each in ours if not each.arm.num_prefill]
    found = []
    for num_workers in sorted({each.arm.num_workers for each in splits}):
        candidates = [each for each in splits if each.arm.num_workers == num_workers]
        equals = [each for each in wholes if any(each.arm.equals(other.arm) for other in candidates)]
        if equals:
            found.append(_payoff(num_workers, max(candidates, key=rank_key), max(equals, key=rank_key)))
    return tuple(found)


def rank_key(arm: ArmReach) -> tuple[float, float]:
    """Return the reach of an arm and, to break ties, its peak goodput."""
    return arm.reach.load, arm.curve.peak.goodput.value


def _payoff(num_workers: int, split: ArmReach, whole: ArmReach) -> Payoff:
    draws = gain_draws(split.reach, whole.reach)
    ratio = None
    if split.reach.is_bracketed and whole.reach.is_bracketed:
        estimate = Estimate.around(split.reach.load / whole.reach.load, np.exp(draws))
        ratio = estimate if estimate.low > 0 and estimate.high < math.inf else None
    return Payoff(
        num_workers=num_workers,
        split=split,
        whole=whole,
        ratio=ratio,
        verdict=Verdict.of(draws),
        loads=tuple(_at_loads(split.curve, whole.curve)),
    )


def _at_loads(split: ArmCurve, whole: ArmCurve) -> Iterable[AtLoad]:
    for reading in split.readings:
        other = whole.at(reading.load)
        if other is not None:
            draws = _goodput_draws(split, reading) - _goodput_draws(whole, other)
            difference = reading.goodput.value - other.goodput.value
            yield AtLoad(load=reading.load, difference=Estimate.around(difference, draws), verdict=Verdict.of(draws))


def _goodput_draws(curve: ArmCurve, reading: Reading) -> Draws:
    return goodput_draws(reading.points, seed=curve.seed, dispersion=curve.dispersion)

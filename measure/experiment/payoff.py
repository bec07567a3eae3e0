"""Whether disaggregation pays: the best split of some workers against the best aggregated arm of as many."""

import enum
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from measure.experiment.curves import Curve, Draws, Reading, goodput_draws, interval
from measure.experiment.points import Arm
from measure.experiment.reach import LoadReach, gain_draws, sure_of
from measure.load.estimates import CONFIDENCE, Estimate


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
class Reached:
    """An arm and its reach."""

    curve: Curve
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
    split: Reached
    """Best split arm of that size."""
    whole: Reached
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


def payoffs_of(arms: Iterable[Reached]) -> tuple[Payoff, ...]:
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


def rank_key(arm: Reached) -> tuple[float, float]:
    """Return the reach of an arm and, to break ties, its peak goodput."""
    return arm.reach.load, arm.curve.peak.goodput.value


def _payoff(num_workers: int, split: Reached, whole: Reached) -> Payoff:
    draws = gain_draws(split.reach, whole.reach)
    ratio = None
    if split.reach.is_bracketed and whole.reach.is_bracketed:
        estimate = interval(split.reach.load / whole.reach.load, np.exp(draws))
        ratio = estimate if estimate.low > 0 and estimate.high < math.inf else None
    return Payoff(
        num_workers=num_workers,
        split=split,
        whole=whole,
        ratio=ratio,
        verdict=Verdict.of(draws),
        loads=tuple(_at_loads(split.curve, whole.curve)),
    )


def _at_loads(split: Curve, whole: Curve) -> Iterable[AtLoad]:
    for reading in split.readings:
        other = whole.at(reading.load)
        if other is not None:
            draws = _goodput_draws(split, reading) - _goodput_draws(whole, other)
            difference = reading.goodput.value - other.goodput.value
            yield AtLoad(load=reading.load, difference=interval(difference, draws), verdict=Verdict.of(draws))


def _goodput_draws(curve: Curve, reading: Reading) -> Draws:
    return goodput_draws(reading.points, seed=curve.seed, dispersion=curve.dispersion)

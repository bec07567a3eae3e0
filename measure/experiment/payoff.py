"""Whether disaggregation pays: the best split of some workers against the best of as many that do both.

Two arms are compared as equals when they have as many workers, or as many threads in all where that is said.
"""

import enum
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from measure.experiment.curves import Curve, Draws, Reading, goodput_draws, interval
from measure.experiment.means import are_equals
from measure.experiment.points import Arm
from measure.experiment.reach import Reach, gain_draws, sure_of
from measure.load.estimates import CONFIDENCE, Estimate


class Verdict(enum.StrEnum):
    """Of a comparison."""

    MORE = "more"
    LESS = "less"
    UNCLEAR = "cannot tell"

    @classmethod
    def of(cls, draws: Draws) -> "Verdict":
        """Return whether draws of a difference are on one side of 0, but for the tails outside 95 %."""
        sure, tail = sure_of(draws), (1 - CONFIDENCE) / 2
        if sure >= 1 - tail:
            return cls.MORE
        return cls.LESS if sure <= tail else cls.UNCLEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """An arm and how far it can go."""

    curve: Curve
    reach: Reach

    @property
    def arm(self) -> Arm:
        """The arm."""
        return self.curve.arm


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLoad:
    """Two arms under one load."""

    load: float
    difference: Estimate
    """Of goodput, requests per second."""
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """What splitting prefill from decode gains with equal means."""

    num_workers: int
    """Of the split arm."""
    split: Reached
    """The best one of that size."""
    whole: Reached
    """The best aggregated one."""
    ratio: Estimate | None
    """Reach of the one by that of the other; None where loads were too low or too high to know it."""
    verdict: Verdict
    loads: tuple[AtLoad, ...]
    """Loads that both were measured at, ascending."""

    @property
    def flips(self) -> tuple[tuple[AtLoad, AtLoad], ...]:
        """Neighbouring loads between which the better one becomes the worse one; those that do not tell left out."""
        told = [each for each in self.loads if each.verdict is not Verdict.UNCLEAR]
        return tuple((before, after) for before, after in itertools.pairwise(told) if before.verdict != after.verdict)


def payoffs_of(arms: Iterable[Reached]) -> tuple[Payoff, ...]:
    """Return a comparison for each number of workers that has both kinds of arms, ascending."""
    ours = [each for each in arms if not each.arm.is_external]
    splits = [each for each in ours if each.arm.num_prefill]
    wholes = [each for each in ours if not each.arm.num_prefill]
    found = []
    for num_workers in sorted({each.arm.num_workers for each in splits}):
        candidates = [each for each in splits if each.arm.num_workers == num_workers]
        equals = [each for each in wholes if any(are_equals(each.arm, other.arm) for other in candidates)]
        if equals:
            found.append(_payoff(num_workers, max(candidates, key=goes_how_far), max(equals, key=goes_how_far)))
    return tuple(found)


def goes_how_far(arm: Reached) -> tuple[float, float]:
    """Return what arms are ranked by: their reach and, where that tells nothing, their most goodput at any load."""
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

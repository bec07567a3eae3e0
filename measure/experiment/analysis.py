"""Findings of an experiment: how far each arm goes, what limits it, and whether a split pays.

Everything is computed from the points. One arm is called better than another only if 95 % of the random draws of their
capacities agree; else the verdict is `Verdict.UNCLEAR`.
"""

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from measure.experiment.capacity import Capacity, capacity_of
from measure.experiment.curves import ArmCurve, Reading, curves_of
from measure.experiment.points import Arm, MeanUnit, Point, Source
from measure.load.estimates import CONFIDENCE, Estimate

_FULL_SHARE = 0.95
"""Share of pages in use from which requests wait for memory."""
_SPARE_SHARE = 0.8
"""Utilization below which a prefill pool has time left."""


class Limit(enum.StrEnum):
    """Resource that is too small.

    A prefill pool that is too small shows in late first tokens, and in requests that are refused because of them. A
    decode pool that is too small shows in long gaps between tokens, or in full pages: then answers wait for a place,
    and their first tokens are late. Utilization says less: a decode worker steps whenever it has one answer to write,
    so it is busy long before it is full.
    """

    NOTHING = "nothing yet"
    PREFILL = "prefill pool"
    DECODE = "decode pool"
    MEMORY = "KV memory"
    WORKERS = "workers"
    """Workers of an aggregated arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDiagnosis:
    """Limit of an arm at one load."""

    limit: Limit
    load: float
    why: str
    """Reason, with numbers."""


def diagnose(reading: Reading, arm: Arm, *, share: float) -> LoadDiagnosis:
    """Return the resource that keeps `share` of the requests at a load from being good."""
    if reading.good_share.value >= share:
        why = f"{reading.good_share.value:.1%} of the requests were good"
        return LoadDiagnosis(limit=Limit.NOTHING, load=reading.load, why=why)
    late, slow = reading.share_of("num_ttft_misses"), reading.share_of("num_tpot_misses")
    refused = reading.share_of("num_not_complete")
    kv_peak = reading.mean_of(lambda point: point.kv_peak)
    busy = reading.mean_of(lambda point: point.prefill_busy)
    why = f"{late:.1%} of the first tokens came late, {refused:.1%} were refused, {slow:.1%} of the answers were slow"
    if busy is not None:
        why += f"; the prefill pool computed {busy:.0%} of the time"
    if kv_peak is not None:
        why += f", at most {kv_peak:.0%} of a worker's pages were in use"
    is_full = kv_peak is not None and kv_peak >= _FULL_SHARE
    if arm.num_prefill == 0:
        limit = Limit.MEMORY if is_full else Limit.WORKERS
    elif slow > late + refused:
        limit = Limit.DECODE
    else:
        limit = Limit.MEMORY if is_full and busy is not None and busy < _SPARE_SHARE else Limit.PREFILL
    return LoadDiagnosis(limit=limit, load=reading.load, why=why)


class Verdict(enum.StrEnum):
    """Outcome of a comparison."""

    MORE = "more"
    LESS = "less"
    UNCLEAR = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Capacity of an arm against that of another."""

    ratio: Estimate | None
    """None if either capacity is not between the measured loads."""
    verdict: Verdict

    @classmethod
    def of(cls, ours: "ArmFinding", theirs: "ArmFinding") -> "Gain":
        """Compare two arms by their capacity for each unit."""
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(ours.capacity.draws / ours.num_units) - np.log(theirs.capacity.draws / theirs.num_units)
        # Where both are above, or both below, all measured loads, they are alike.
        draws = np.nan_to_num(logs, nan=0.0, posinf=math.inf, neginf=-math.inf)
        sure, tail = float(np.mean(draws > 0) + np.mean(draws == 0) / 2), (1 - CONFIDENCE) / 2
        verdict = Verdict.MORE if sure >= 1 - tail else Verdict.LESS if sure <= tail else Verdict.UNCLEAR
        ratio = None
        if ours.capacity.is_bracketed and theirs.capacity.is_bracketed:
            estimate = Estimate.around(ours.per_unit / theirs.per_unit, np.exp(draws))
            ratio = estimate if estimate.low > 0 and estimate.high < math.inf else None
        return cls(ratio=ratio, verdict=verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFinding:
    """Findings on one arm."""

    curve: ArmCurve
    capacity: Capacity
    num_units: int
    """Workers of the arm, threads of all its workers, or 1; see `MeanUnit`."""
    limit: LoadDiagnosis
    """Diagnosis of the lowest load that was not served; of the highest one when all were."""

    @property
    def arm(self) -> Arm:
        """Arm of the curve."""
        return self.curve.arm

    @property
    def per_unit(self) -> float:
        """Capacity per unit."""
        return self.capacity.load / self.num_units

    @property
    def rank(self) -> tuple[float, float]:
        """Capacity per unit and, to break ties, the peak goodput per unit."""
        return self.per_unit, self.curve.peak.goodput.value / self.num_units


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings from the points of one source."""

    source: Source
    share: float
    """Share of the requests that had to be good."""
    unit: MeanUnit
    """Unit by which arms of different size are compared."""
    arms: tuple[ArmFinding, ...]
    """Ordered by workers; for equal numbers splits first, other systems last."""

    @property
    def points(self) -> Iterator[Point]:
        """Points of all arms, by load and repeat."""
        return (point for arm in self.arms for reading in arm.curve.readings for point in reading.points)

    @property
    def best(self) -> ArmFinding:
        """Arm that serves most for each unit."""
        return max(self.arms, key=lambda arm: arm.rank)

    @property
    def best_splits(self) -> tuple[ArmFinding, ...]:
        """Best split of each number of workers, ascending."""
        splits = {arm.arm.num_workers: arm for arm in sorted(self._ours(is_split=True), key=lambda arm: arm.rank)}
        return tuple(splits[num_workers] for num_workers in sorted(splits))

    def rival_of(self, split: ArmFinding) -> ArmFinding | None:
        """Return the best aggregated arm with as many workers or threads as a split; None without one."""
        wholes = [arm for arm in self._ours(is_split=False) if arm.arm.equals(split.arm)]
        return max(wholes, key=lambda arm: arm.rank, default=None)

    def gain_of(self, arm: ArmFinding) -> Gain | None:
        """Return the gain of a split over its rival; None for another arm, and without a rival."""
        rival = self.rival_of(arm) if arm.arm.is_split else None
        return None if rival is None else Gain.of(arm, rival)

    def _ours(self, *, is_split: bool) -> Iterator[ArmFinding]:
        return (arm for arm in self.arms if arm.arm.is_split is is_split and not arm.arm.is_external)


def analyze(points: Iterable[Point], *, share: float = 0.99, kinds: tuple[str, ...] = ()) -> tuple[Findings, ...]:
    """Return the findings of real points, of simulated ones, or of both; only requests of `kinds` count, empty: all."""
    curves = sorted(curves_of(points, kinds), key=_place)
    found = []
    for source in Source:
        ours = [curve for curve in curves if curve.source is source]
        unit = MeanUnit.of(curve.arm for curve in ours)
        if ours:
            arms = tuple(_finding(curve, share=share, unit=unit) for curve in ours)
            found.append(Findings(source=source, share=share, unit=unit, arms=arms))
    return tuple(found)


def _place(curve: ArmCurve) -> tuple[bool, int, bool, int, str]:
    """Return the sort key of an arm."""
    arm = curve.arm
    return arm.is_external, arm.num_workers, not arm.is_split, arm.num_prefill, arm.name


def _finding(curve: ArmCurve, *, share: float, unit: MeanUnit) -> ArmFinding:
    diagnoses = [diagnose(reading, curve.arm, share=share) for reading in curve.readings]
    return ArmFinding(
        curve=curve,
        capacity=capacity_of(curve, share=share),
        num_units=curve.arm.num_units(unit),
        limit=next((each for each in diagnoses if each.limit is not Limit.NOTHING), diagnoses[-1]),
    )

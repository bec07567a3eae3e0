"""Findings of an experiment: how far each arm goes, what limits it, which ratio is best, which worker to add next.

Everything is computed from the points and the searches. One arm is called better than another only if 95 % of the
random draws agree; else the verdict is `Verdict.UNCLEAR`. Intervals are those of independent requests, widened by how
much runs of one load differ (`measure.experiment.curves.dispersion_of`).
"""

import enum
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from measure.experiment.capacity import ArmCapacity
from measure.experiment.curves import ArmCurve, Reading, curves_of
from measure.experiment.payoff import ArmReach, Payoff, Verdict, gain_draws, knee_of, payoffs_of, rank_key, reach_of
from measure.experiment.points import MeanUnit, Point, Source
from measure.load.estimates import Estimate

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


def diagnose(reading: Reading, curve: ArmCurve, *, share: float) -> LoadDiagnosis:
    """Return the resource that keeps `share` of the requests at a load from being good."""
    bad = 1 - reading.good_share.value
    if bad <= 1 - share:
        why = f"{reading.good_share.value:.1%} of the requests were good"
        return LoadDiagnosis(limit=Limit.NOTHING, load=reading.load, why=why)
    late = reading.share_of(lambda figures: figures.num_ttft_misses)
    slow = reading.share_of(lambda figures: figures.num_tpot_misses)
    refused = reading.share_of(lambda figures: figures.num_not_complete)
    kv_peak = reading.mean_of(lambda point: point.kv_peak)
    busy = reading.mean_of(lambda point: point.prefill_busy)
    is_full = kv_peak is not None and kv_peak >= _FULL_SHARE
    why = f"{late:.1%} of the first tokens came late, {refused:.1%} were refused, {slow:.1%} of the answers were slow"
    if busy is not None:
        why += f"; the prefill pool computed {busy:.0%} of the time"
    if kv_peak is not None:
        why += f", at most {kv_peak:.0%} of a worker's pages were in use"
    return LoadDiagnosis(limit=_limit(curve, late + refused, slow, busy, is_full=is_full), load=reading.load, why=why)


def _limit(curve: ArmCurve, late: float, slow: float, busy: float | None, *, is_full: bool) -> Limit:
    if curve.arm.num_prefill == 0:
        return Limit.MEMORY if is_full else Limit.WORKERS
    if slow > late:
        return Limit.DECODE
    has_time_left = busy is not None and busy < _SPARE_SHARE
    return Limit.MEMORY if is_full and has_time_left else Limit.PREFILL


def first_limit(curve: ArmCurve, *, share: float) -> LoadDiagnosis:
    """Return the diagnosis of the lowest load that was not served; of the highest one when all were."""
    diagnoses = [diagnose(reading, curve, share=share) for reading in curve.readings]
    return next((each for each in diagnoses if each.limit is not Limit.NOTHING), diagnoses[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class NextWorker:
    """Pool in which one more worker helps most."""

    pool: str
    """"prefill", "decode", or "" when it is unclear."""
    why: str
    is_measured: bool
    """Whether both ways of adding a worker were measured; else it follows from what limits the arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFinding(ArmReach):
    """Findings on one arm."""

    knee: float | None
    """Load from which goodput stays below the load."""
    limit: LoadDiagnosis
    next_worker: NextWorker | None
    """None for an aggregated arm, or when nothing limits the arm yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All splits of one number of workers, best first."""

    num_workers: int
    arms: tuple[ArmFinding, ...]
    verdict: Verdict
    """Comparison of the first with the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Load that one worker of each pool carries, from the arms in which its pool gave way first."""

    per_prefill: Estimate
    """Requests per second: median and range of the arms."""
    per_decode: Estimate

    @property
    def prefill_share(self) -> float:
        """Share of prefill workers at which both pools give way at once."""
        return self.per_decode.value / (self.per_decode.value + self.per_prefill.value)

    def split(self, num_workers: int) -> tuple[int, int]:
        """Return the (prefill, decode) workers that carry the most. At least two workers."""
        splits = [(num, num_workers - num) for num in range(1, num_workers)]
        return max(splits, key=lambda each: min(each[0] * self.per_prefill.value, each[1] * self.per_decode.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings from the points of one source."""

    source: Source
    share: float
    """Share of the requests that had to be good."""
    kinds: tuple[str, ...]
    """Kinds of requests that count; empty: all."""
    unit: MeanUnit
    """Unit by which arms of different size are compared."""
    arms: tuple[ArmFinding, ...]
    """Ordered by workers; for equal numbers splits first, other systems last."""
    rankings: tuple[Ranking, ...]
    """Rankings of splits, ordered by workers."""
    payoffs: tuple[Payoff, ...]
    """Comparisons with aggregated arms, ordered by workers."""
    balance: Balance | None
    """None unless both pools were seen giving way."""

    def of(self, name: str) -> ArmFinding | None:
        """Return the findings on an arm; None if it is unknown."""
        return next((each for each in self.arms if each.arm.name == name), None)


def analyze(
    points: Iterable[Point],
    *,
    share: float = 0.99,
    kinds: tuple[str, ...] = (),
    capacities: Iterable[ArmCapacity] = (),
) -> tuple[Findings, ...]:
    """Return the findings of real points, of simulated ones, or of both. Raises ExperimentError for unknown kinds."""
    searched = {(each.source, each.arm.name): each for each in capacities}
    curves = sorted(curves_of(points), key=_place)
    found = []
    for source in Source:
        ours = [curve for curve in curves if curve.source is source]
        unit = MeanUnit.of(curve.arm for curve in ours)
        arms = [
            ArmReach(
                curve=curve,
                reach=reach_of(
                    curve,
                    share=share,
                    num_units=curve.arm.num_units(unit),
                    kinds=kinds,
                    found=searched.get((source, curve.arm.name)),
                ),
            )
            for curve in ours
        ]
        if not arms:
            continue
        findings = tuple(_finding(each, arms, share=share) for each in arms)
        found.append(
            Findings(
                source=source,
                share=share,
                kinds=kinds,
                unit=unit,
                arms=findings,
                rankings=tuple(_rankings(findings)),
                payoffs=payoffs_of(arms),
                balance=_balance(findings),
            )
        )
    return tuple(found)


def _place(curve: ArmCurve) -> tuple[bool, int, bool, int, str]:
    """Return the sort key of an arm."""
    arm = curve.arm
    return arm.is_external, arm.num_workers, arm.num_prefill == 0, arm.num_prefill, arm.name


def _finding(arm: ArmReach, others: Sequence[ArmReach], *, share: float) -> ArmFinding:
    limit = first_limit(arm.curve, share=share)
    return ArmFinding(
        curve=arm.curve,
        reach=arm.reach,
        knee=knee_of(arm.curve),
        limit=limit,
        next_worker=_next_worker(arm, others, limit),
    )


def _next_worker(arm: ArmReach, others: Sequence[ArmReach], limit: LoadDiagnosis) -> NextWorker | None:
    num_prefill, num_decode = arm.arm.num_prefill, arm.arm.num_decode
    if num_prefill == 0:
        return None
    by_pools = {
        (each.arm.num_prefill, each.arm.num_decode): each
        for each in others
        if each.arm.settings == arm.arm.settings and each.reach.is_bracketed
    }
    prefill, decode = by_pools.get((num_prefill + 1, num_decode)), by_pools.get((num_prefill, num_decode + 1))
    if prefill is not None and decode is not None:
        return _measured_next(prefill, decode)
    pools = {Limit.PREFILL: "prefill", Limit.DECODE: "decode", Limit.MEMORY: "decode"}
    if limit.limit not in pools:
        return None
    return NextWorker(
        pool=pools[limit.limit], why=f"the {limit.limit} gives way first; no neighbour was measured", is_measured=False
    )


def _measured_next(prefill: ArmReach, decode: ArmReach) -> NextWorker:
    why = f"{prefill.arm.name} serves {prefill.reach.load:.3g}/s, {decode.arm.name} {decode.reach.load:.3g}/s"
    pools = {Verdict.MORE: "prefill", Verdict.LESS: "decode", Verdict.UNCLEAR: ""}
    verdict = Verdict.of(gain_draws(prefill.reach, decode.reach))
    return NextWorker(pool=pools[verdict], why=why, is_measured=True)


def _rankings(arms: Sequence[ArmFinding]) -> Iterable[Ranking]:
    splits = [each for each in arms if each.arm.num_prefill and not each.arm.is_external]
    for num_workers in sorted({each.arm.num_workers for each in splits}):
        rest = [each for each in splits if each.arm.num_workers == num_workers]
        ranked = sorted(rest, key=rank_key, reverse=True)
        verdict = Verdict.UNCLEAR
        if len(ranked) > 1:
            verdict = Verdict.of(gain_draws(ranked[0].reach, ranked[1].reach))
        yield Ranking(num_workers=num_workers, arms=tuple(ranked), verdict=verdict)


def _balance(arms: Sequence[ArmFinding]) -> Balance | None:
    known = [each for each in arms if each.arm.num_prefill and each.reach.is_bracketed]
    prefill = [each.reach.load / each.arm.num_prefill for each in known if each.limit.limit is Limit.PREFILL]
    decode = [
        each.reach.load / each.arm.num_decode for each in known if each.limit.limit in (Limit.DECODE, Limit.MEMORY)
    ]
    if not prefill or not decode:
        return None
    return Balance(per_prefill=_range(prefill), per_decode=_range(decode))


def _range(values: Sequence[float]) -> Estimate:
    return Estimate(value=statistics.median(values), low=min(values), high=max(values))

"""What an experiment's points say: how far each arm goes, what limits it, which ratio is best, and what comes next.

Everything is computed from the points and, where there were searches, from these. Nothing is said to be better than
something else unless 95 % of what may as well have been measured says so, too; else it is `Verdict.UNCLEAR`. Intervals
are those of independent requests, widened by how much runs of one load differ
(`measure.experiment.curves.dispersion_of`).
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from measure.experiment.capacity import Capacity
from measure.experiment.curves import Curve, curves_of
from measure.experiment.limits import Diagnosis, Limit, first_limit
from measure.experiment.means import Unit, num_units, unit_of
from measure.experiment.payoff import Payoff, Reached, Verdict, goes_how_far, payoffs_of
from measure.experiment.points import Point, Source
from measure.experiment.reach import gain_draws, knee_of, reach_of
from measure.load.estimates import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class NextWorker:
    """Where one more worker does most."""

    pool: str
    """"prefill", "decode", or "" when one cannot tell."""
    why: str
    is_measured: bool
    """Whether both ways of adding one were measured; else it follows from what limits the arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFinding(Reached):
    """What is known of an arm."""

    knee: float | None
    """Load from which on goodput stays behind it."""
    limit: Diagnosis
    next_worker: NextWorker | None
    """None: aggregated, or nothing limits it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All splits of as many workers, the best one first."""

    num_workers: int
    arms: tuple[ArmFinding, ...]
    verdict: Verdict
    """Whether the first is known to go further than the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What one worker of each pool carries, from the arms in which its pool gave way first."""

    per_prefill: Estimate
    """Requests per second; the median arm, and the range of all."""
    per_decode: Estimate

    @property
    def prefill_share(self) -> float:
        """Prefill workers of all, for which both pools give way at once."""
        return self.per_decode.value / (self.per_decode.value + self.per_prefill.value)

    def split(self, num_workers: int) -> tuple[int, int]:
        """Return the (prefill, decode) workers that carry most. At least two workers."""
        splits = [(num, num_workers - num) for num in range(1, num_workers)]
        return max(splits, key=lambda each: min(each[0] * self.per_prefill.value, each[1] * self.per_decode.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the points of one source say."""

    source: Source
    share: float
    """So many of the requests had to be good."""
    kinds: tuple[str, ...]
    """Of these kinds; empty: of all."""
    unit: Unit
    """What arms of unequal size are compared by."""
    arms: tuple[ArmFinding, ...]
    """By workers; of as many, splits first and other systems last."""
    rankings: tuple[Ranking, ...]
    """By workers; splits only."""
    payoffs: tuple[Payoff, ...]
    """By workers."""
    balance: Balance | None
    """None: not every pool was seen giving way."""

    def of(self, name: str) -> ArmFinding | None:
        """Return what is known of an arm."""
        return next((each for each in self.arms if each.arm.name == name), None)


def analyze(
    points: Iterable[Point],
    *,
    share: float = 0.99,
    kinds: tuple[str, ...] = (),
    capacities: Iterable[Capacity] = (),
) -> tuple[Findings, ...]:
    """Return the findings of real points, of simulated ones, or of both. Raises ExperimentError for unknown kinds."""
    searched = {(each.source, each.arm.name): each for each in capacities}
    curves = sorted(curves_of(points), key=_place)
    found = []
    for source in Source:
        ours = [curve for curve in curves if curve.source is source]
        unit = unit_of(curve.arm for curve in ours)
        arms = [
            Reached(
                curve=curve,
                reach=reach_of(
                    curve,
                    share=share,
                    num_units=num_units(curve.arm, unit),
                    kinds=kinds,
                    found=searched.get((source, curve.arm.name)),
                ),
            )
            for curve in ours
        ]
        if arms:
            found.append(_findings(arms, source=source, share=share, kinds=kinds, unit=unit))
    return tuple(found)


def _place(curve: Curve) -> tuple[bool, int, bool, int, str]:
    """Return where an arm stands among others."""
    arm = curve.arm
    return arm.is_external, arm.num_workers, arm.num_prefill == 0, arm.num_prefill, arm.name


def _findings(arms: Sequence[Reached], *, source: Source, share: float, kinds: tuple[str, ...], unit: Unit) -> Findings:
    findings = tuple(_finding(each, arms, share=share) for each in arms)
    return Findings(
        source=source,
        share=share,
        kinds=kinds,
        unit=unit,
        arms=findings,
        rankings=tuple(_rankings(findings)),
        payoffs=payoffs_of(arms),
        balance=_balance(findings),
    )


def _finding(arm: Reached, others: Sequence[Reached], *, share: float) -> ArmFinding:
    limit = first_limit(arm.curve, share=share)
    return ArmFinding(
        curve=arm.curve,
        reach=arm.reach,
        knee=knee_of(arm.curve),
        limit=limit,
        next_worker=_next_worker(arm, others, limit),
    )


def _next_worker(arm: Reached, others: Sequence[Reached], limit: Diagnosis) -> NextWorker | None:
    num_prefill, num_decode = arm.arm.num_prefill, arm.arm.num_decode
    if num_prefill == 0:
        return None
    by_pools = {
        (each.arm.num_prefill, each.arm.num_decode): each
        for each in others
        if each.arm.settings == arm.arm.settings and each.reach.is_bracketed
    }
    one_more = [by_pools.get(pools) for pools in ((num_prefill + 1, num_decode), (num_prefill, num_decode + 1))]
    prefill, decode = one_more
    if prefill is not None and decode is not None:
        return _measured_next(prefill, decode)
    pools = {Limit.PREFILL: "prefill", Limit.DECODE: "decode", Limit.MEMORY: "decode"}
    if limit.limit not in pools:
        return None
    return NextWorker(
        pool=pools[limit.limit], why=f"the {limit.limit} gives way first; no neighbour was measured", is_measured=False
    )


def _measured_next(prefill: Reached, decode: Reached) -> NextWorker:
    why = f"{prefill.arm.name} serves {prefill.reach.load:.3g}/s, {decode.arm.name} {decode.reach.load:.3g}/s"
    pools = {Verdict.MORE: "prefill", Verdict.LESS: "decode", Verdict.UNCLEAR: ""}
    verdict = Verdict.of(gain_draws(prefill.reach, decode.reach))
    return NextWorker(pool=pools[verdict], why=why, is_measured=True)


def _rankings(arms: Sequence[ArmFinding]) -> Iterable[Ranking]:
    splits = [each for each in arms if each.arm.num_prefill and not each.arm.is_external]
    for num_workers in sorted({each.arm.num_workers for each in splits}):
        rest = [each for each in splits if each.arm.num_workers == num_workers]
        ranked = sorted(rest, key=goes_how_far, reverse=True)
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

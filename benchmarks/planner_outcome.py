"""What a day was worth with one way of sizing the pools; kept as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import BaseModel

from benchmarks.planner_arms import Arm
from cluster.planner.observation import Pool
from common.slo import Slo
from measure.simulate.records import RequestResult, SimRun

GPUS_PER_WORKER = 4
NUM_BINS = 72
"""Equal parts of the day, over which load and attainment are told."""
_KINDS = ("fixed", "ray", "dynamo", "ours")


class Change(BaseModel):
    """A plan for other sizes."""

    at_s: float
    prefill: int
    decode: int
    reason: str


class Presence(BaseModel):
    """One worker's time in a pool."""

    pool: Pool
    asked_s: float
    serving_s: float | None
    gone_s: float | None
    is_flipped: bool


class Outcome(BaseModel):
    """One arm's day."""

    name: str
    kind: str
    day_s: float
    gpu_hours: float
    num_requests: int
    num_refused: int
    """Refused or failed."""
    good_share: float
    ttft_share: float
    """Of all requests: first token in time."""
    itl_share: float
    """Of all requests: answered, with gaps within the objective."""
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    worst_bin: float
    """Good share of the worst part of the day."""
    num_starts: int
    num_flips: int
    num_leaves: int
    """Workers that were told to go, flips apart."""
    num_moves: int
    """Answers that went on on another worker because theirs was to go."""
    hit: float
    """Cached tokens of all prompt tokens."""
    wall_s: float
    changes: list[Change]
    presences: list[Presence]
    arrived: list[int]
    good: list[int]
    """By part of the day."""

    @property
    def kind_order(self) -> int:
        """Where its kind stands in tables."""
        return _KINDS.index(self.kind)

    @property
    def line(self) -> str:
        """The outcome in a line."""
        return (
            f"{self.name}: {self.gpu_hours:.1f} GPU-hours, {self.good_share:.2%} good, worst {self.worst_bin:.1%},"
            f" TTFT {self.ttft_share:.2%} p99 {self.ttft_p99_s:.1f} s, gaps {self.itl_share:.2%},"
            f" {self.num_starts} starts, {self.num_flips} flips, {self.num_leaves} leave, {self.num_moves} moved"
        )

    def size(self, pool: Pool, times: Sequence[float]) -> list[int]:
        """Return a pool's workers that are paid for at these times."""
        return [
            sum(p.pool is pool and p.asked_s <= at_s and (p.gone_s is None or at_s < p.gone_s) for p in self.presences)
            for at_s in times
        ]


def outcome_of(finished: SimRun, *, arm: Arm, slo: Slo, day_s: float) -> Outcome:
    """Return what a finished run was worth."""
    results = finished.results
    good = [slo.is_good(result) for result in results]
    bins = [min(NUM_BINS - 1, int(result.arrival_s / day_s * NUM_BINS)) for result in results]
    arrived, num_good = Counter(bins), Counter(b for b, is_good in zip(bins, good, strict=True) if is_good)
    ttfts = [result.ttft_s for result in results if result.ttft_s is not None]
    gaps = [result.tpot_s for result in results if result.tpot_s is not None]
    stays = finished.stays
    num_flips = sum(stay.is_flipped for stay in stays)
    return Outcome(
        name=arm.name,
        kind=arm.kind,
        day_s=day_s,
        gpu_hours=GPUS_PER_WORKER * sum(stay.paid_s(until_s=day_s) for stay in stays) / 3600,
        num_requests=len(results),
        num_refused=sum(not result.is_complete for result in results),
        good_share=sum(good) / len(results),
        ttft_share=sum(slo.meets_ttft(result) for result in results) / len(results),
        itl_share=sum(result.is_complete and slo.meets_tpot(result) for result in results) / len(results),
        ttft_p50_s=float(np.percentile(ttfts, 50)),
        ttft_p99_s=float(np.percentile(ttfts, 99)),
        itl_p99_s=float(np.percentile(gaps, 99)),
        worst_bin=min(num_good[b] / arrived[b] for b in arrived),
        num_starts=len(stays) - num_flips - arm.first.prefill - arm.first.decode,
        num_flips=num_flips,
        num_leaves=sum(stay.leaving_s is not None for stay in stays) - num_flips,
        num_moves=finished.num_moves,
        hit=_hit(results),
        wall_s=finished.wall_s,
        changes=list(_changes(finished)),
        presences=[
            Presence(
                pool=stay.pool,
                asked_s=stay.asked_s,
                serving_s=stay.serving_s,
                gone_s=stay.gone_s,
                is_flipped=stay.is_flipped,
            )
            for stay in stays
        ],
        arrived=[arrived[b] for b in range(NUM_BINS)],
        good=[num_good[b] for b in range(NUM_BINS)],
    )


def _changes(finished: SimRun) -> Iterator[Change]:
    for note in finished.plans:
        if note.is_change:
            sizes = note.plan.sizes
            yield Change(at_s=note.at_s, prefill=sizes.prefill, decode=sizes.decode, reason=note.plan.reason)


def _hit(results: Sequence[RequestResult]) -> float:
    num_tokens = sum(result.num_prompt_tokens for result in results if result.is_complete)
    return sum(result.num_cached_tokens for result in results) / max(1, num_tokens)

"""Result of a day with one way of sizing the pools, kept as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planner.arms import Arm
from common.slo import Slo
from measure.figures import summarize
from measure.simulate.records import SimRun
from measure.simulate.results import count_cached_tokens

GPUS_PER_WORKER = 4
NUM_BINS = 72
"""Number of equal parts of the day, of which the worst one is told."""
_KINDS = ("fixed", "ray", "dynamo", "ours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one arm."""

    name: str
    kind: str
    gpu_hours: float
    num_requests: int
    num_refused: int
    """Requests that were refused or failed."""
    good_share: float
    ttft_share: float
    """Share of all requests whose first token was in time."""
    tpot_share: float
    """Share of all requests that are complete with a mean gap within the objective."""
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    worst_bin: float
    """Share of good requests in the worst part of the day."""
    num_starts: int
    num_flips: int
    num_leaves: int
    """Workers that were asked to leave, without flips."""
    num_moves: int
    """Answers that moved to another worker because theirs was leaving."""
    hit: float
    """Cached tokens of all prompt tokens."""
    wall_s: float

    @property
    def kind_order(self) -> int:
        """Position of its kind in tables."""
        return _KINDS.index(self.kind)

    @property
    def line(self) -> str:
        """Result in a line."""
        return (
            f"{self.name}: {self.gpu_hours:.1f} GPU-hours, {self.good_share:.2%} good, worst {self.worst_bin:.1%},"
            f" TTFT {self.ttft_share:.2%} p99 {self.ttft_p99_s:.1f} s, gaps {self.tpot_share:.2%},"
            f" {self.num_starts} starts, {self.num_flips} flips, {self.num_leaves} leave, {self.num_moves} moved"
        )

    @property
    def cells(self) -> dict[str, str]:
        """Cells of its row by column."""
        return {
            "arm": self.name,
            "GPU-hours": f"{self.gpu_hours:.1f}",
            "good %": f"{100 * self.good_share:.2f}",
            "worst part of the day %": f"{100 * self.worst_bin:.1f}",
            "TTFT in time %": f"{100 * self.ttft_share:.2f}",
            "gaps in time %": f"{100 * self.tpot_share:.2f}",
            "TTFT p50/p99 s": f"{self.ttft_p50_s:.2f} / {self.ttft_p99_s:.1f}",
            "hit %": f"{100 * self.hit:.1f}",
            "started": str(self.num_starts),
            "flipped": str(self.num_flips),
            "left": str(self.num_leaves),
            "answers moved": str(self.num_moves),
        }


def markdown_table(outcomes: Sequence[Outcome], *, goal: float) -> str:
    """Return one row per arm; those that reach the goal are marked."""
    rows = [each.cells | {"holds": "yes" if each.good_share >= goal else "no"} for each in outcomes]
    if not rows:
        return ""
    lines = [f"| {' | '.join(cells)} |" for cells in (rows[0], *(row.values() for row in rows))]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def outcome_of(finished: SimRun, *, arm: Arm, slo: Slo, day_s: float) -> Outcome:
    """Return the result of a finished run. Raises ValueError when no request was answered."""
    requests, stays = finished.requests, finished.stays
    figures = summarize(requests, slo=slo)
    if figures.ttft is None or figures.tpot is None:
        raise ValueError(f"{arm.name}: no request was answered")
    bins = [min(NUM_BINS - 1, int(request.due_s / day_s * NUM_BINS)) for request in requests]
    arrived = Counter(bins)
    num_good = Counter(part for part, request in zip(bins, requests, strict=True) if slo.is_good(request))
    num_flips = sum(stay.is_flipped for stay in stays)
    num_tokens = sum(request.num_prompt_tokens for request in requests if request.is_complete)
    return Outcome(
        name=arm.name,
        kind=arm.kind,
        gpu_hours=GPUS_PER_WORKER * sum(stay.paid_s(until_s=day_s) for stay in stays) / 3600,
        num_requests=figures.num_requests,
        num_refused=figures.num_not_complete,
        good_share=figures.good_share,
        ttft_share=sum(map(slo.meets_ttft, requests)) / len(requests),
        tpot_share=(figures.num_complete - figures.num_tpot_misses) / len(requests),
        ttft_p50_s=figures.ttft.p50,
        ttft_p99_s=figures.ttft.p99,
        tpot_p99_s=figures.tpot.p99,
        worst_bin=min(num_good[part] / arrived[part] for part in arrived),
        num_starts=len(stays) - num_flips - arm.first.prefill - arm.first.decode,
        num_flips=num_flips,
        num_leaves=sum(stay.leaving_s is not None for stay in stays) - num_flips,
        num_moves=finished.num_moves,
        hit=sum(map(count_cached_tokens, requests)) / max(1, num_tokens),
        wall_s=finished.wall_s,
    )

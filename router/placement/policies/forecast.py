"""Predictions of prompts, token gaps and whole plans, by each worker's own timing model."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.ids import WorkerId
from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest, Plan, PlanCandidate, Pull, RetainedOn
from router.placement.policies.pooled import NUM_EXPLAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForecast:
    """Computing the prompt on one worker."""

    worker: ProjectedLoad
    pull: Pull | None
    num_cached_tokens: int
    """Cached tokens, pulled ones included."""
    wait_s: float
    """Time until the prompts accepted before are computed."""
    pull_s: float
    prefill_s: float
    tier_s: float = 0.0
    """Time until blocks are read from tiers, reads before them included: on the worker, then on the source."""
    tier_reads: Mapping[WorkerId, int] = field(default_factory=dict)
    """Blocks that are read so, by worker."""

    @property
    def ttft_s(self) -> float:
        """Time from the choice to the first token when reads and a pull follow the wait."""
        return self.wait_s + self.tier_s + self.pull_s + self.prefill_s

    @property
    def fetched_s(self) -> float:
        """Time from the choice until prompts before are computed and all cached blocks are there, in parallel."""
        return max(self.wait_s, self.tier_s + self.pull_s)

    @property
    def tier_read_s(self) -> float:
        """Part of `fetched_s` in which nothing but tiers is waited for."""
        return max(0.0, self.tier_s - self.wait_s)

    @property
    def ready_s(self) -> float:
        """Time from the choice to the end of the computation when reads and a pull run during the wait."""
        return self.fetched_s + self.prefill_s


def forecast_prompt(
    request: PlacementRequest,
    worker: ProjectedLoad,
    *,
    pull: Pull | None = None,
    block_bytes: int = 0,
    num_decodes: int = 0,
) -> PromptForecast:
    """Predict the prompt's computation, after a pull if there is one, beside `num_decodes` decoding sequences."""
    cached = request.cached_tokens(worker.worker_id)
    pull_s = 0.0
    if pull is not None:
        held = cached
        cached = max(held, min(pull.num_blocks, request.num_usable_blocks) * request.block_size)
        num_blocks = (cached - held) // request.block_size
        pull_s = worker.timing.pull_s(pull.source, num_blocks * block_bytes)
    prefill_s = worker.timing.prefill_s(
        request.num_tokens - cached,
        cached,
        num_decodes=num_decodes,
        num_context_tokens=worker.num_context_tokens if num_decodes else 0,
    )
    return PromptForecast(
        worker=worker,
        pull=pull,
        num_cached_tokens=cached,
        wait_s=worker.prefill_wait_s(request.now_s),
        pull_s=pull_s,
        prefill_s=prefill_s,
    )


def forecast_tpot_s(request: PlacementRequest, worker: ProjectedLoad, *, num_output_tokens: int = 0) -> float:
    """Predict the mean gap between tokens on a worker when half of the request's answer is written there."""
    num_context_tokens = worker.num_context_tokens + request.num_tokens + num_output_tokens // 2
    return worker.timing.itl_s(worker.num_decodes + request.num_samples, num_context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """A whole plan and its cost; local when the decode worker computes the prompt."""

    prompt: PromptForecast
    decode: ProjectedLoad
    tpot_s: float
    """Mean gap between tokens on the decode worker, this request included."""
    cost: float
    """Cost that the policy minimizes."""
    terms: Mapping[str, float]

    @property
    def prefill_id(self) -> WorkerId | None:
        """The prefill worker; None for a local plan."""
        return None if self.prompt.worker is self.decode else self.prompt.worker.worker_id

    def candidate(self) -> PlanCandidate:
        """Return the option for `Explain`."""
        pull = self.prompt.pull
        return PlanCandidate(
            prefill=self.prefill_id,
            answering=self.decode.worker_id,
            source=None if pull is None else pull.source,
            cost=self.cost,
            terms=self.terms,
        )


def forecast_plan(prompt: PromptForecast, decode: ProjectedLoad, tpot_s: float) -> PlanForecast:
    """Return a plan whose cost is the time to the first token."""
    terms = {"queue": prompt.wait_s, "pull": prompt.pull_s, "prefill": prompt.prefill_s, "tpot": tpot_s}
    return PlanForecast(prompt=prompt, decode=decode, tpot_s=tpot_s, cost=prompt.ttft_s, terms=terms)


def make_plan(
    best: Sequence[PlanForecast],
    *,
    ttft_s: float,
    reason: str,
    num_options: int,
    retained_on: RetainedOn = RetainedOn.BOTH,
) -> Plan:
    """Return the first of the best options as a plan, with the others for `Explain`."""
    chosen = best[0]
    return Plan(
        answering=chosen.decode.worker_id,
        prefill=chosen.prefill_id,
        predicted_cached_tokens=chosen.prompt.num_cached_tokens,
        reason=reason,
        pull=chosen.prompt.pull,
        retained_on=retained_on,
        predicted_prefill_s=chosen.prompt.prefill_s,
        predicted_ttft_s=ttft_s,
        predicted_tpot_s=chosen.tpot_s,
        predicted_tier_read_s=chosen.prompt.tier_read_s,
        tier_reads=chosen.prompt.tier_reads,
        candidates=lambda: tuple(option.candidate() for option in best),
        num_candidates=num_options,
    )


def make_soonest_plan(chosen: PlanForecast, options: Sequence[PlanForecast]) -> Plan:
    """Return the plan of the chosen option, with the best others for `Explain`."""
    others = (option for option in options if option is not chosen)
    best = (chosen, *heapq.nsmallest(NUM_EXPLAINED - 1, others, key=lambda option: option.cost))
    reason = f"first token in {chosen.cost:.3f} s, then one every {chosen.tpot_s:.4f} s"
    return make_plan(best, ttft_s=chosen.cost, reason=reason, num_options=len(options))

"""Predictions of prompts and token gaps on a worker, by the worker's own timing model."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import WorkerId
from router.placement.plans import Candidate, PlacementRequest, Plan, Pull, WorkerLoad
from router.placement.policies.pooled import NUM_EXPLAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForecast:
    """Computing the prompt on one worker."""

    worker: WorkerLoad
    pull: Pull | None
    num_cached_tokens: int
    """Cached tokens, pulled ones included."""
    queue_s: float
    pull_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        """Time from now to the first token."""
        return self.queue_s + self.pull_s + self.prefill_s


def forecast_prompt(
    request: PlacementRequest,
    worker: WorkerLoad,
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
        queue_s=worker.prefill_wait_s(request.now_s),
        pull_s=pull_s,
        prefill_s=prefill_s,
    )


def forecast_itl_s(request: PlacementRequest, worker: WorkerLoad, *, num_output_tokens: int = 0) -> float:
    """Predict the gap between tokens on a worker when half of the request's answer is written there."""
    num_context_tokens = worker.num_context_tokens + request.num_tokens + num_output_tokens // 2
    return worker.timing.itl_s(worker.num_decodes + request.num_samples, num_context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """A whole plan; local when the decode worker computes the prompt."""

    prompt: PromptForecast
    decode: WorkerLoad
    itl_s: float

    @property
    def prefill_id(self) -> WorkerId | None:
        """The prefill worker; None for a local plan."""
        return None if self.prompt.worker is self.decode else self.prompt.worker.worker_id

    def candidate(self) -> Candidate:
        """Return the option for `Explain`; its cost is the time to the first token."""
        prompt = self.prompt
        return Candidate(
            prefill=self.prefill_id,
            decode=self.decode.worker_id,
            source=None if prompt.pull is None else prompt.pull.source,
            cost=prompt.ttft_s,
            terms={"queue": prompt.queue_s, "pull": prompt.pull_s, "prefill": prompt.prefill_s, "itl": self.itl_s},
        )


def make_forecast_plan(chosen: PlanForecast, options: Sequence[PlanForecast]) -> Plan:
    """Return the plan of the chosen option, with the best others for `Explain`."""
    prompt = chosen.prompt
    rest = heapq.nsmallest(
        NUM_EXPLAINED - 1, (option for option in options if option is not chosen), key=lambda o: o.prompt.ttft_s
    )
    best = (chosen, *rest)
    return Plan(
        decode=chosen.decode.worker_id,
        prefill=chosen.prefill_id,
        predicted_cached_tokens=prompt.num_cached_tokens,
        reason=f"first token in {prompt.ttft_s:.3f} s, then one every {chosen.itl_s:.4f} s",
        pull=prompt.pull,
        predicted_prefill_s=prompt.prefill_s,
        predicted_ttft_s=prompt.ttft_s,
        predicted_itl_s=chosen.itl_s,
        candidates=lambda: tuple(option.candidate() for option in best),
        num_candidates=len(options),
    )

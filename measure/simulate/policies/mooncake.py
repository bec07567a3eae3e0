"""`mooncake`: least predicted time to first token, pulling a prefix from its best holder where that is much longer.

    for each prefill worker p:
        if best_hit > 1.5 * hit(p):  hit = best_hit, T_x = transfer(best_hit - hit(p))
        else:                        hit = hit(p),   T_x = 0
        TTFT(p) = T_x + T_queue(p) + T_prefill(prompt, hit)
    p = the least TTFT, the first of equals; d = the least predicted time between tokens, likewise

Source: Mooncake (FAST '25), Algorithm 1, "KVCache-centric scheduling". Times come from each worker's own timing model
where the paper fits polynomials offline. The paper sets its balancing threshold by hand and gives no value. Refusing
what would miss an objective, which is published as part of the algorithm, is left to `router.shed`.

Adapted: blocks are pulled from the pool that computes prompts, where the paper has a store of its own; hot blocks are
replicated by these pulls. Without a prefill pool the decode workers take both parts, and d is p.
"""

from collections.abc import Sequence

from common.errors import Refused
from router.placement.answer_pool import AnswerPool
from router.placement.loads import ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest, Plan, PolicySettings, Pull
from router.placement.policies.eligible import find_eligible, refuse_without
from router.placement.policies.forecast import (
    PlanForecast,
    PromptForecast,
    forecast_plan,
    forecast_prompt,
    forecast_tpot_s,
    make_soonest_plan,
)

BALANCING_THRESHOLD = 1.5


class Mooncake:
    """Algorithm 1."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def choose(self, request: PlacementRequest, fleet: FleetView) -> Plan | Refused:
        """Choose the worker that computes, and the one that decodes."""
        eligible = find_eligible(request, fleet)
        if isinstance(eligible, Refused):
            return eligible
        decode = min(eligible.decode, key=lambda worker: forecast_tpot_s(request, worker))
        if eligible.must_be_local:
            options = _options(request, eligible.decode.loads, fleet)
        elif request.missing_tokens(decode.worker_id) <= self._settings.local_prefill_max_tokens:
            options = _options(request, (decode,), fleet)
        else:
            options = _options(request, eligible.prefill.loads, fleet, decode=decode)
        if not options:
            return refuse_without(AnswerPool.PREFILL)
        chosen = min(options, key=lambda option: option.prompt.ttft_s)
        return make_soonest_plan(chosen, options)


def _options(
    request: PlacementRequest, pool: Sequence[ProjectedLoad], fleet: FleetView, *, decode: ProjectedLoad | None = None
) -> list[PlanForecast]:
    """Return a plan for each worker of the pool; without `decode` the worker also decodes."""
    pairs = [(prompt, decode or prompt.worker) for prompt in _forecast_all(request, pool, fleet)]
    return [forecast_plan(prompt, worker, forecast_tpot_s(request, worker)) for prompt, worker in pairs]


def _forecast_all(request: PlacementRequest, pool: Sequence[ProjectedLoad], fleet: FleetView) -> list[PromptForecast]:
    def hit(worker: ProjectedLoad) -> int:
        return min(request.cached_blocks.get(worker.worker_id, 0), request.num_usable_blocks)

    best = max((worker for worker in pool if worker.worker_id in fleet.sources), key=hit, default=None)
    pull = None
    if best is not None:
        pull = Pull(source=best.worker_id, num_blocks=min(hit(best), request.pullable_blocks(best.worker_id)))
    return [
        forecast_prompt(
            request,
            worker,
            pull=pull if pull is not None and pull.num_blocks > BALANCING_THRESHOLD * hit(worker) else None,
            block_bytes=fleet.block_bytes,
        )
        for worker in pool
    ]

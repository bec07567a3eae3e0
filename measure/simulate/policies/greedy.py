"""`greedy_perfect_signals`: the fewest missed objectives, then the least predicted time to first token.

For simulations only. The policy trusts its view of the fleet, which the simulator makes perfect: reports without delay,
exact timing models, the true length of the answer. It compares every local plan and every prefill worker, with
and without a pull from the best holder; the decode worker of a remote plan is the one with the least gap between
tokens. The gap counts the prompts that a worker computes meanwhile, spread over the answer. A local prompt delays every
sequence that decodes beside it, each at DELAY_PRICE. As with `predictive`, a prompt that would wait longer than
`max_prefill_wait_s` stays in the router's queue.

The policy is greedy, one request at a time: it bounds what better signals can gain, not what placement can.
"""

from collections.abc import Iterator

from common.errors import Refused
from router.placement.answer_pool import AnswerPool
from router.placement.loads import ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest, Plan, PolicySettings, Pull
from router.placement.policies.eligible import Eligible, find_eligible, refuse_busy, refuse_without
from router.placement.policies.forecast import (
    PlanForecast,
    PromptForecast,
    forecast_plan,
    forecast_prompt,
    forecast_tpot_s,
    make_soonest_plan,
)
from router.placement.policies.prices import DELAY_PRICE


class Greedy:
    """Chooses the best plan for each request by itself."""

    def __init__(self, settings: PolicySettings) -> None:
        self._max_prefill_wait_s = settings.max_prefill_wait_s

    def choose(self, request: PlacementRequest, fleet: FleetView) -> Plan | Refused:
        """Return the best of all plans, or why there is none now."""
        eligible = find_eligible(request, fleet)
        if isinstance(eligible, Refused):
            return eligible
        if not eligible.must_be_local and not eligible.prefill:
            return refuse_without(AnswerPool.PREFILL)
        options = [*_local_options(request, eligible, fleet), *_remote_options(request, eligible, fleet)]
        best = min(options, key=lambda option: _key(request, option))
        if best.prompt.wait_s > self._max_prefill_wait_s:
            return refuse_busy(best.prompt.worker, best.prompt.wait_s, self._max_prefill_wait_s)
        return make_soonest_plan(best, options)


def _key(request: PlacementRequest, option: PlanForecast) -> tuple[int, float, float]:
    """Return what is minimized: missed objectives, time to the first token with the delay it causes, gap of tokens."""
    prompt = option.prompt
    missed = (option.tpot_s > request.tpot_slo_s) + (request.waited_s + prompt.ttft_s > request.ttft_slo_s)
    delayed_s = prompt.prefill_s * option.decode.num_decodes if option.prefill_id is None else 0.0
    return missed, prompt.ttft_s + DELAY_PRICE * delayed_s, option.tpot_s


def _local_options(request: PlacementRequest, eligible: Eligible, fleet: FleetView) -> Iterator[PlanForecast]:
    for worker in eligible.decode:
        for prompt in _forecast_with_pull(request, worker, fleet, num_decodes=worker.num_decodes):
            tpot_s = _tpot_s(request, worker, prefill_s=prompt.prefill_s if worker.num_decodes else 0.0)
            yield forecast_plan(prompt, worker, tpot_s)


def _remote_options(request: PlacementRequest, eligible: Eligible, fleet: FleetView) -> Iterator[PlanForecast]:
    # The first token does not depend on the decode worker, nor the others on the prefill worker.
    decode = min(
        eligible.decode, key=lambda worker: (_tpot_s(request, worker), request.missing_tokens(worker.worker_id))
    )
    tpot_s = _tpot_s(request, decode)
    for worker in eligible.prefill:
        for prompt in _forecast_with_pull(request, worker, fleet, num_decodes=0):
            yield forecast_plan(prompt, decode, tpot_s)


def _forecast_with_pull(
    request: PlacementRequest, worker: ProjectedLoad, fleet: FleetView, *, num_decodes: int
) -> Iterator[PromptForecast]:
    yield forecast_prompt(request, worker, num_decodes=num_decodes)
    holders = [worker_id for worker_id in request.cached_blocks if worker_id in fleet.sources]
    if not holders:
        return
    source = max(holders, key=lambda worker_id: request.cached_blocks[worker_id])
    pull = Pull(source=source, num_blocks=min(request.pullable_blocks(source), request.num_usable_blocks))
    if pull.num_blocks > request.cached_blocks.get(worker.worker_id, 0):
        yield forecast_prompt(request, worker, pull=pull, block_bytes=fleet.block_bytes, num_decodes=num_decodes)


def _tpot_s(request: PlacementRequest, worker: ProjectedLoad, *, prefill_s: float = 0.0) -> float:
    """Predict the mean gap between tokens, with the prompts that the worker computes meanwhile."""
    stall_s = worker.prefill_wait_s(request.now_s) + prefill_s
    gap_s = forecast_tpot_s(request, worker, num_output_tokens=request.num_output_tokens)
    return gap_s + stall_s / max(request.num_output_tokens, 1)

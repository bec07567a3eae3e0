"""`oracle`: the least predicted time to first token whose decoding meets its objective, with perfect information.

It believes its view of the fleet, and the simulator makes the view perfect for it: reports without delay, exact timing
models, the true length of the answer. Considers every local plan, and every prefill worker with
and without a pull from the best holder, with the decode worker of the least inter-token latency. A local prompt delays
the sequences that decode beside it once; this counts, spread over an answer of the request's length, as latency.

It looks at one request at a time: an upper bound on what knowing more can gain, not on what placement can.
"""

from collections.abc import Iterator

from common.errors import Refused
from router.placement.plans import FleetView, Plan, PlanKind, Pull, RouteRequest, WorkerLoad
from router.placement.policies.eligible import Eligible, find_eligible, refuse_without_prefill
from router.placement.policies.forecast import (
    PlanForecast,
    PromptForecast,
    forecast_itl_s,
    forecast_prompt,
    make_forecast_plan,
)


class Oracle:
    """Perfect information, one request at a time."""

    def choose(self, request: RouteRequest, fleet: FleetView) -> Plan | Refused:
        """Choose among all plans."""
        eligible = find_eligible(request, fleet)
        if isinstance(eligible, Refused):
            return eligible
        options = [*_local_options(request, eligible, fleet), *_remote_options(request, eligible, fleet)]
        if not eligible.must_be_local and not eligible.prefill:
            return refuse_without_prefill()
        return make_forecast_plan(min(options, key=lambda option: _key(request, option)), options)


def _key(request: RouteRequest, option: PlanForecast) -> tuple[bool, float, float]:
    return option.itl_s > request.itl_slo_s, option.prompt.ttft_s, option.itl_s


def _local_options(request: RouteRequest, eligible: Eligible, fleet: FleetView) -> Iterator[PlanForecast]:
    for worker in eligible.decode:
        for prompt in _forecast_with_pull(request, worker, fleet, num_decodes=worker.num_decodes):
            delay_s = prompt.prefill_s / max(request.num_output_tokens, 1) if worker.num_decodes else 0.0
            itl_s = _itl_s(request, worker) + delay_s
            yield PlanForecast(kind=PlanKind.LOCAL, prompt=prompt, decode=worker, itl_s=itl_s)


def _remote_options(request: RouteRequest, eligible: Eligible, fleet: FleetView) -> Iterator[PlanForecast]:
    # The first token does not depend on the decode worker, nor the others on the prefill worker.
    decode = min(
        eligible.decode, key=lambda worker: (_itl_s(request, worker), request.missing_tokens(worker.worker_id))
    )
    itl_s = _itl_s(request, decode)
    for worker in eligible.prefill:
        for prompt in _forecast_with_pull(request, worker, fleet, num_decodes=0):
            yield PlanForecast(kind=PlanKind.REMOTE, prompt=prompt, decode=decode, itl_s=itl_s)


def _forecast_with_pull(
    request: RouteRequest, worker: WorkerLoad, fleet: FleetView, *, num_decodes: int
) -> Iterator[PromptForecast]:
    yield forecast_prompt(request, worker, num_decodes=num_decodes)
    holders = [worker_id for worker_id in request.cached_blocks if worker_id in fleet.sources]
    if not holders:
        return
    source = max(holders, key=lambda worker_id: request.cached_blocks[worker_id])
    pull = Pull(source=source, num_blocks=min(request.pullable_blocks(source), request.num_usable_blocks))
    if pull.num_blocks > request.cached_blocks.get(worker.worker_id, 0):
        yield forecast_prompt(request, worker, pull=pull, block_bytes=fleet.block_bytes, num_decodes=num_decodes)


def _itl_s(request: RouteRequest, worker: WorkerLoad) -> float:
    return forecast_itl_s(request, worker, num_output_tokens=request.num_output_tokens)

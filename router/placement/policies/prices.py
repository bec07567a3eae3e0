"""The terms of the predictive policy's cost, each in seconds; see `predictive` for the whole."""

from collections.abc import Iterable, Mapping

from common.ids import WorkerId
from router.placement.loads import ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest, Pull
from router.placement.policies.forecast import PlanForecast, PromptForecast

MISS_PRICE = 10.0
"""Price of a missed objective, in multiples of the promised time to first token."""
PREFILL_WORK_PRICE = 0.5
"""Price of a second of computation that later requests cannot use."""
RESERVE_PRICE = 0.5
"""Additional price of that second on a decode worker beside prefill workers, which is there to decode."""
DELAY_PRICE = 0.1
"""Price of a second by which a decoding sequence is delayed, once in an answer of many tokens."""
HANDOFF_S = 3e-3
"""Duration of a handoff's calls."""
MIN_PULLED_BLOCKS = 2
"""A single block is only the beginning of the chat template."""


def compute_on(
    request: PlacementRequest,
    fleet: FleetView,
    sources: Iterable[tuple[int, WorkerId]],
    worker: ProjectedLoad,
    *,
    work_price: float,
) -> tuple[float, PromptForecast]:
    """Return the cheapest way for one worker, computing alone or after a pull, behind its cost."""
    timing, num_tokens, most_usable = worker.timing, request.num_tokens, request.num_usable_blocks
    wait_s = worker.prefill_wait_s(request.now_s)
    own_blocks = min(request.cached_blocks.get(worker.worker_id, 0), most_usable)
    cached = own_blocks * request.block_size
    decodes = {"num_decodes": worker.num_decodes, "num_context_tokens": worker.num_context_tokens}
    compute_s, pull_s, pull = timing.prefill_s(num_tokens - cached, cached, **decodes), 0.0, None
    cost = wait_s + (1 + work_price) * compute_s
    num_cached_tokens, rest_s = cached, compute_s
    for num_blocks, source in sources:
        usable = min(num_blocks, most_usable)
        if source == worker.worker_id or usable < own_blocks + MIN_PULLED_BLOCKS:
            continue
        pulling_s = timing.pull_s(source, (usable - own_blocks) * fleet.block_bytes)
        if num_cached_tokens != usable * request.block_size:  # the next source often holds as much
            num_cached_tokens = usable * request.block_size
            rest_s = timing.prefill_s(num_tokens - num_cached_tokens, num_cached_tokens, **decodes)
        if (other := max(wait_s, pulling_s) + (1 + work_price) * rest_s) < cost:
            cost, cached, compute_s, pull_s = other, num_cached_tokens, rest_s, pulling_s
            pull = Pull(source=source, num_blocks=usable)
    forecast = PromptForecast(
        worker=worker, pull=pull, num_cached_tokens=cached, wait_s=wait_s, pull_s=pull_s, prefill_s=compute_s
    )
    return cost, forecast


def token_price(request: PlacementRequest, decode: ProjectedLoad, *, held_up_s: float = 0.0) -> float:
    """Return the cost of the answer on a decode worker: its own tokens and the delay of all others."""
    before, after = _gaps(request, decode)
    others = (after - before) * decode.num_decodes / 2  # on average, half of each answer is still to come
    return (after + others) * request.num_output_tokens + _missed_gaps(request, decode, before, after + held_up_s)


def _gaps(request: PlacementRequest, decode: ProjectedLoad) -> tuple[float, float]:
    """Return the gap between tokens without and with this request."""
    timing, num, context = decode.timing, decode.num_decodes, decode.num_context_tokens
    before = timing.itl_s(num, context) if num else 0.0
    after = timing.itl_s(num + request.num_samples, context + request.num_samples * request.num_tokens)
    return before, after


def _missed_gaps(request: PlacementRequest, decode: ProjectedLoad, before: float, after: float) -> float:
    newly_missed = _probably(after, request.tpot_slo_s) - _probably(before, request.tpot_slo_s)
    num_missed = _probably(after, request.tpot_slo_s) + max(0.0, newly_missed) * decode.num_decodes
    return MISS_PRICE * _miss_unit(request) * num_missed


def _missed_first_token(request: PlacementRequest, ready_s: float) -> float:
    return MISS_PRICE * _miss_unit(request) * _probably(request.waited_s + ready_s, request.ttft_slo_s)


def _miss_unit(request: PlacementRequest) -> float:
    return request.ttft_slo_s if request.ttft_slo_s != float("inf") else 1.0


def _probably(predicted_s: float, objective_s: float) -> float:
    """Return the probability that the objective is missed; predictions are off by 10 to 20 percent."""
    if objective_s == float("inf"):
        return 0.0
    return min(1.0, max(0.0, (predicted_s / objective_s - 0.8) / 0.4))


def remote_option(
    request: PlacementRequest, fleet: FleetView, prompt: PromptForecast, decode: ProjectedLoad, tokens_s: float
) -> PlanForecast:
    """Return the plan that computes here and decodes there; `tokens_s` is the decode worker's `token_price`."""
    present = request.cached_blocks.get(decode.worker_id, 0)
    num_bytes = max(0, request.num_prefill_blocks - present) * fleet.block_bytes
    transfer_s = decode.timing.pull_s(prompt.worker.worker_id, num_bytes)
    last_chunk = min(request.num_tokens - prompt.num_cached_tokens, prompt.worker.timing.max_step_tokens)
    last_s = transfer_s * min(1.0, last_chunk / max(1, request.num_tokens))
    exposed_s = HANDOFF_S + max(last_s, transfer_s - prompt.prefill_s)
    return _priced(request, prompt, decode, PREFILL_WORK_PRICE, {"transfer": exposed_s, "tokens": tokens_s})


def local_option(request: PlacementRequest, prompt: PromptForecast, *, work_price: float) -> PlanForecast:
    """Return the plan in which a decode worker does everything."""
    decode = prompt.worker
    # Prompts computed here delay all decoding sequences; spread over an answer as long as theirs are.
    held_up_s = (prompt.wait_s + prompt.prefill_s) / request.typical_output_tokens
    tokens_s = token_price(request, decode, held_up_s=held_up_s)
    return _priced(request, prompt, decode, work_price, {"tokens": tokens_s})


def _priced(
    request: PlacementRequest,
    prompt: PromptForecast,
    decode: ProjectedLoad,
    work_price: float,
    own_terms: Mapping[str, float],
) -> PlanForecast:
    terms = {
        "wait": prompt.wait_s,
        "pull": max(0.0, prompt.pull_s - prompt.wait_s),
        "compute": prompt.prefill_s,
        "work": work_price * prompt.prefill_s,
        **own_terms,
        "missed": _missed_first_token(request, prompt.ready_s),
    }
    cost = sum(terms.values())
    return PlanForecast(prompt=prompt, decode=decode, tpot_s=_gaps(request, decode)[1], cost=cost, terms=terms)

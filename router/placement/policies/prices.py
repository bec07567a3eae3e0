"""The terms of the predictive policy's cost, each in seconds; see `predictive` for the whole."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from common.ids import WorkerId
from common.timing import GUESSED_TIMING
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSource:
    """A worker that leading blocks of the prompt can be pulled from."""

    worker_id: WorkerId
    num_blocks: int
    """Leading blocks to pull."""
    num_in_pages: int
    """Leading blocks in its pages; it reads further ones from its tiers, and sends them from there."""
    load: ProjectedLoad | None = None
    """Its load, as far as it is known."""

    def read_s(self, num_bytes: int, now_s: float) -> float:
        """Return how long bytes take to come from its tiers."""
        return GUESSED_TIMING.tier_read_s(num_bytes) if self.load is None else self.load.tier_read_s(num_bytes, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBlocks:
    """The leading blocks that a worker has itself and uses."""

    num_blocks: int
    num_offloaded: int
    """The last ones, which it reads from its tiers."""


def pull_sources(
    request: PlacementRequest, fleet: FleetView, holders: Iterable[tuple[int, WorkerId]]
) -> list[PullSource]:
    """Return the ways to pull from these (blocks, worker), the best first: all of their blocks, or those in pages."""
    sources = []
    for _blocks, worker_id in holders:
        # What a worker was only sent to compute may be waited for there, but cannot be fetched from there yet.
        num_blocks = min(request.pullable_blocks(worker_id), request.num_usable_blocks)
        if num_offloaded := min(num_blocks, request.offloaded_blocks(worker_id)):
            num_in_pages = num_blocks - num_offloaded
            load = fleet.prefill.find(worker_id) or fleet.decode.find(worker_id)
            source = PullSource(worker_id=worker_id, num_blocks=num_blocks, num_in_pages=num_in_pages, load=load)
            sources += [source, replace(source, num_blocks=num_in_pages)]
        else:
            sources.append(PullSource(worker_id=worker_id, num_blocks=num_blocks, num_in_pages=num_blocks))
    return sources


def compute_on(
    request: PlacementRequest,
    fleet: FleetView,
    sources: Sequence[PullSource],
    worker: ProjectedLoad,
    *,
    work_price: float,
) -> tuple[float, PromptForecast]:
    """Return the cheapest way for one worker, behind its cost.

    It computes alone or after a pull, and reads all that it has in its tiers only, or none of it: the more tokens are
    before a block, the longer it takes to compute, so that where any read pays, that of all does.
    """
    num_blocks = min(request.cached_blocks.get(worker.worker_id, 0), request.num_usable_blocks)
    num_offloaded = request.offloaded_blocks(worker.worker_id)
    own = OwnBlocks(num_blocks=num_blocks, num_offloaded=num_offloaded)
    best = _compute_with(own, request, fleet, sources, worker, work_price=work_price)
    if not num_offloaded:
        return best
    own = OwnBlocks(num_blocks=num_blocks - num_offloaded, num_offloaded=0)
    return min(best, _compute_with(own, request, fleet, sources, worker, work_price=work_price), key=itemgetter(0))


def _compute_with(
    own: OwnBlocks,
    request: PlacementRequest,
    fleet: FleetView,
    sources: Sequence[PullSource],
    worker: ProjectedLoad,
    *,
    work_price: float,
) -> tuple[float, PromptForecast]:
    timing, num_tokens = worker.timing, request.num_tokens
    wait_s = worker.prefill_wait_s(request.now_s)
    own_s = tier_s = worker.tier_read_s(own.num_offloaded * fleet.block_bytes, request.now_s)
    cached = own.num_blocks * request.block_size
    decodes = {"num_decodes": worker.num_decodes, "num_context_tokens": worker.num_context_tokens}
    compute_s, pull_s, pull, num_reads = timing.prefill_s(num_tokens - cached, cached, **decodes), 0.0, None, 0
    cost = max(wait_s, own_s) + (1 + work_price) * compute_s
    num_cached_tokens, rest_s = cached, compute_s
    for source in sources:
        usable = source.num_blocks
        if source.worker_id == worker.worker_id or usable < own.num_blocks + MIN_PULLED_BLOCKS:
            continue
        pulling_s = timing.pull_s(source.worker_id, (usable - own.num_blocks) * fleet.block_bytes)
        reading_s, num_read = own_s, usable - source.num_in_pages
        if num_read > 0:
            reading_s += source.read_s(num_read * fleet.block_bytes, request.now_s)
        if num_cached_tokens != usable * request.block_size:  # the next source often holds as much
            num_cached_tokens = usable * request.block_size
            rest_s = timing.prefill_s(num_tokens - num_cached_tokens, num_cached_tokens, **decodes)
        if (other := max(wait_s, reading_s + pulling_s) + (1 + work_price) * rest_s) < cost:
            cost, cached, compute_s, pull_s = other, num_cached_tokens, rest_s, pulling_s
            pull, tier_s, num_reads = Pull(source=source.worker_id, num_blocks=usable), reading_s, num_read
    reads = {} if pull is None or num_reads <= 0 else {pull.source: num_reads}
    if own.num_offloaded:
        reads[worker.worker_id] = own.num_offloaded
    forecast = PromptForecast(
        worker=worker,
        pull=pull,
        num_cached_tokens=cached,
        wait_s=wait_s,
        pull_s=pull_s,
        prefill_s=compute_s,
        tier_s=tier_s,
        tier_reads=reads,
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
    present = request.cached_blocks.get(decode.worker_id, 0) - request.offloaded_blocks(decode.worker_id)
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
        "pull": prompt.fetched_s - prompt.wait_s - prompt.tier_read_s,
        "compute": prompt.prefill_s,
        "work": work_price * prompt.prefill_s,
        **own_terms,
        "missed": _missed_first_token(request, prompt.ready_s),
    }
    if prompt.tier_s:
        terms["tier_read"] = prompt.tier_read_s
    cost = sum(terms.values())
    return PlanForecast(prompt=prompt, decode=decode, tpot_s=_gaps(request, decode)[1], cost=cost, terms=terms)

"""The terms of the predictive policy's cost, each in seconds; see `predictive` for the whole."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.ids import WorkerId
from router.placement.plans import FleetView, PlacementRequest, Pull, WorkerLoad

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


@dataclass(frozen=True, slots=True)
class Compute:
    """How one worker would compute the prompt."""

    worker: WorkerLoad
    cost: float
    wait_s: float
    pull_s: float
    compute_s: float
    num_cached_tokens: int
    pull: Pull | None

    @property
    def ready_s(self) -> float:
        """Time from the choice to the end of the computation."""
        return max(self.wait_s, self.pull_s) + self.compute_s


@dataclass(frozen=True, slots=True)
class Option:
    """A plan and its price."""

    compute: Compute
    decode: WorkerLoad
    """The plan is local when this worker computes the prompt."""
    terms: Mapping[str, float]
    itl_s: float

    @property
    def cost(self) -> float:
        """Cost that the policy minimizes."""
        return sum(self.terms.values())

    @property
    def prefill_id(self) -> WorkerId | None:
        """The prefill worker; None for a local plan."""
        return None if self.compute.worker is self.decode else self.compute.worker.worker_id


def compute_on(
    request: PlacementRequest,
    fleet: FleetView,
    sources: Iterable[tuple[int, WorkerId]],
    worker: WorkerLoad,
    *,
    work_price: float,
) -> Compute:
    """Return the cheapest way for one worker: computing alone, or after a pull."""
    timing, num_tokens = worker.timing, request.num_tokens
    wait_s = worker.prefill_wait_s(request.now_s)
    own_blocks = min(request.cached_blocks.get(worker.worker_id, 0), request.num_usable_blocks)
    cached = own_blocks * request.block_size
    decodes = {"num_decodes": worker.num_decodes, "num_context_tokens": worker.num_context_tokens}
    compute_s = timing.prefill_s(num_tokens - cached, cached, **decodes)
    best = Compute(worker, wait_s + (1 + work_price) * compute_s, wait_s, 0.0, compute_s, cached, None)
    for num_blocks, source in sources:
        usable = min(num_blocks, request.num_usable_blocks)
        if source == worker.worker_id or usable < own_blocks + MIN_PULLED_BLOCKS:
            continue
        pull_s = timing.pull_s(source, (usable - own_blocks) * fleet.block_bytes)
        cached = usable * request.block_size
        compute_s = timing.prefill_s(num_tokens - cached, cached, **decodes)
        cost = max(wait_s, pull_s) + (1 + work_price) * compute_s
        if cost < best.cost:
            pull = Pull(source=source, num_blocks=usable)
            best = Compute(worker, cost, wait_s, pull_s, compute_s, cached, pull)
    return best


def token_price(request: PlacementRequest, decode: WorkerLoad, *, held_up_s: float = 0.0) -> float:
    """Return the cost of the answer on a decode worker: its own tokens and the delay of all others."""
    before, after = _gaps(request, decode)
    others = (after - before) * decode.num_decodes / 2  # on average, half of each answer is still to come
    return (after + others) * request.num_output_tokens + _missed_gaps(request, decode, before, after + held_up_s)


def _gaps(request: PlacementRequest, decode: WorkerLoad) -> tuple[float, float]:
    """Return the gap between tokens without and with this request."""
    timing, num, context = decode.timing, decode.num_decodes, decode.num_context_tokens
    before = timing.itl_s(num, context) if num else 0.0
    after = timing.itl_s(num + request.num_samples, context + request.num_samples * request.num_tokens)
    return before, after


def _missed_gaps(request: PlacementRequest, decode: WorkerLoad, before: float, after: float) -> float:
    newly_missed = _probably(after, request.itl_slo_s) - _probably(before, request.itl_slo_s)
    num_missed = _probably(after, request.itl_slo_s) + max(0.0, newly_missed) * decode.num_decodes
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
    request: PlacementRequest, fleet: FleetView, compute: Compute, decode: WorkerLoad, tokens_s: float
) -> Option:
    """Return the plan that computes here and decodes there; `tokens_s` is the decode worker's `token_price`."""
    present = request.cached_blocks.get(decode.worker_id, 0)
    num_bytes = max(0, request.num_prefill_blocks - present) * fleet.block_bytes
    transfer_s = decode.timing.pull_s(compute.worker.worker_id, num_bytes)
    last_chunk = min(request.num_tokens - compute.num_cached_tokens, compute.worker.timing.max_step_tokens)
    last_s = transfer_s * min(1.0, last_chunk / max(1, request.num_tokens))
    terms = {
        "wait": compute.wait_s,
        "pull": max(0.0, compute.pull_s - compute.wait_s),
        "compute": compute.compute_s,
        "work": PREFILL_WORK_PRICE * compute.compute_s,
        "transfer": HANDOFF_S + max(last_s, transfer_s - compute.compute_s),
        "tokens": tokens_s,
        "missed": _missed_first_token(request, compute.ready_s),
    }
    return Option(compute, decode, terms, _gaps(request, decode)[1])


def local_option(request: PlacementRequest, compute: Compute, *, work_price: float) -> Option:
    """Return the plan in which a decode worker does everything."""
    decode = compute.worker
    # Prompts computed here delay all decoding sequences; spread over an answer as long as this one.
    held_up_s = (compute.wait_s + compute.compute_s) / max(1, request.num_output_tokens)
    terms = {
        "wait": compute.wait_s,
        "pull": max(0.0, compute.pull_s - compute.wait_s),
        "compute": compute.compute_s,
        "work": work_price * compute.compute_s,
        "tokens": token_price(request, decode, held_up_s=held_up_s),
        "missed": _missed_first_token(request, compute.ready_s),
    }
    return Option(compute, decode, terms, _gaps(request, decode)[1])

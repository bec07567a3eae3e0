"""Our own policy: the plan that costs the least, in seconds.

For a prefill worker P and a decode worker D, and for a decode worker that computes the prompt by itself:

    remote(P, D) = first token on P + work(P) + exposed transfer(P → D) + tokens(D) + missed(P, D)
    local(D)     = first token on D + work(D)                           + tokens(D) + missed(D)

- *First token*: max(wait, pull) + compute. The wait is for prompts accepted before, as the worker's own model and the
  bookings since its last report predict. A pull fetches leading blocks from the worker that holds most of them, and goes
  on during the wait; it is planned when computing them would take longer.
- *Work*: what the computation takes from others: half of it on a prefill worker, all of it from every sequence that
  decodes on a worker which does both.
- *Exposed transfer*: the part of the handoff that the computation cannot hide.
- *Tokens*: the newcomer's own answer at the gap between tokens that it will see, and what it adds to the gaps of all
  that decode there already.
- *Missed*: objectives that will probably be missed, the newcomer's and those of the sequences that it slows down, each
  priced at a multiple of the objective, so that it outweighs everything else.

A plan whose wait is longer than `max_wait_s` is not made yet: the request stays in the router's line, where the order
can still change and where the next worker that is free, whichever that will be, takes the one that needs it most.

One copy is enough: after a handoff the same blocks lie on both workers. One of them keeps them for later, the other lets
them go first, so that both pools together hold twice as many different blocks; a pull brings them to where they
are needed. The worker that had them keeps them; new ones are dealt out by the sizes of the pools (cf. singlets in
cooperative caching: Dahlin et al., OSDI 1994).
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.errors import Refused
from common.ids import WorkerId
from router.placement.plans import Candidate, FleetView, Keeper, Plan, PlanKind, Pull, RouteRequest, WorkerLoad

SHORTLIST = 4
"""Workers of each pool that are compared in pairs, after each was ranked by itself."""
MISS_PRICE = 10.0
"""Price of a missed objective, in multiples of the time to first token that was promised."""
PREFILL_WORK_PRICE = 0.5
MIN_PULLED_BLOCKS = 2
"""One block alone is what every chat template begins with."""
NETWORK_S = 1e-3
"""What calls add to a first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictiveSettings:
    """Bounds of the policy."""

    local_prefill_max_tokens: int
    """Uncached tokens that a decode worker computes itself although there are prefill workers."""
    max_wait_s: float
    """Longest wait at a worker; whoever would wait longer waits in the router's line."""


@dataclass(frozen=True, slots=True)
class _Compute:
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
        return max(self.wait_s, self.pull_s) + self.compute_s


@dataclass(frozen=True, slots=True)
class _Option:
    """A plan and its price."""

    compute: _Compute
    decode: WorkerLoad
    is_local: bool
    terms: dict[str, float]
    itl_s: float

    @property
    def cost(self) -> float:
        return sum(self.terms.values())


class Predictive:
    """Chooses the plan of least cost. Event loop only."""

    def __init__(self, settings: PredictiveSettings) -> None:
        self._settings = settings
        self._dealt = 0.0

    def choose(self, request: RouteRequest, fleet: FleetView) -> Plan | Refused:
        """Return the cheapest plan, or why there is none now."""
        decodes = [d for d in fleet.decode if d.num_free_blocks >= request.num_decode_blocks]
        if not decodes:
            return _no_pages(request, fleet)
        prefills = [p for p in fleet.prefill if p.num_blocks >= request.num_prefill_blocks]
        if not prefills and fleet.num_prefill and not fleet.prefill:
            return Refused(reason="no prefill worker is available", retry_after_s=1.0)
        sources = _sources(request, fleet)
        options = [
            *self._remote(request, fleet, sources, prefills, decodes),
            *self._local(request, fleet, sources, decodes, has_prefill=bool(prefills)),
        ]
        if not options:
            return Refused(reason="no prefill worker is available", retry_after_s=1.0)
        options.sort(key=lambda option: option.cost)
        best = options[0]
        if best.compute.wait_s > self._settings.max_wait_s:
            return Refused(
                reason=f"every worker is busy with prompts for {best.compute.wait_s:.1f} s",
                retry_after_s=best.compute.wait_s - self._settings.max_wait_s,
            )
        return self._plan(request, fleet, options)

    def _remote(
        self,
        request: RouteRequest,
        fleet: FleetView,
        sources: Sequence[tuple[int, WorkerId]],
        prefills: Sequence[WorkerLoad],
        decodes: Sequence[WorkerLoad],
    ) -> Iterator[_Option]:
        if not prefills:
            return
        computes = (_compute(request, fleet, sources, prefill, work_price=PREFILL_WORK_PRICE) for prefill in prefills)
        best_prefills = heapq.nsmallest(SHORTLIST, computes, key=lambda compute: compute.cost)
        priced = (
            (_token_price(request, decode), -request.cached_tokens(decode.worker_id), decode) for decode in decodes
        )
        best_decodes = heapq.nsmallest(SHORTLIST, priced, key=lambda entry: entry[:2])
        for compute in best_prefills:
            for price, _cached, decode in best_decodes:
                yield _remote_option(request, fleet, compute, decode, price)

    def _local(
        self,
        request: RouteRequest,
        fleet: FleetView,
        sources: Sequence[tuple[int, WorkerId]],
        decodes: Sequence[WorkerLoad],
        *,
        has_prefill: bool,
    ) -> Iterator[_Option]:
        computes: list[_Compute] = []
        for decode in decodes:
            if has_prefill and request.missing_tokens(decode.worker_id) > self._settings.local_prefill_max_tokens:
                continue
            computes.append(_compute(request, fleet, sources, decode, work_price=1.0 + decode.num_decodes))
        for compute in heapq.nsmallest(SHORTLIST, computes, key=lambda compute: compute.cost):
            yield _local_option(request, compute, compute.worker)

    def _plan(self, request: RouteRequest, fleet: FleetView, options: Sequence[_Option]) -> Plan:
        best = options[0]
        compute, decode = best.compute, best.decode
        prefill = None if best.is_local else compute.worker.worker_id
        return Plan(
            kind=PlanKind.LOCAL if best.is_local else PlanKind.REMOTE,
            decode=decode.worker_id,
            prefill=prefill,
            pull=compute.pull,
            keeper=Keeper.BOTH if prefill is None else self._keeper(request, fleet, compute, decode),
            predicted_cached_tokens=compute.num_cached_tokens,
            predicted_prefill_s=compute.compute_s,
            predicted_ttft_s=compute.ready_s + NETWORK_S,
            predicted_itl_s=best.itl_s,
            reason=_reason(request, best),
            candidates=lambda: tuple(map(_candidate, options)),
            num_candidates=len(options),
        )

    def _keeper(self, request: RouteRequest, fleet: FleetView, compute: _Compute, decode: WorkerLoad) -> Keeper:
        """Return which side keeps the prompt's blocks."""
        held_by_decode = request.cached_blocks.get(decode.worker_id, 0)
        held_by_prefill = request.cached_blocks.get(compute.worker.worker_id, 0)
        if compute.pull is not None and compute.pull.num_blocks > held_by_decode:
            from_prefill = any(worker.worker_id == compute.pull.source for worker in fleet.prefill)
            return Keeper.PREFILL if from_prefill else Keeper.DECODE
        if max(held_by_decode, held_by_prefill) >= MIN_PULLED_BLOCKS:
            return Keeper.PREFILL if held_by_prefill >= held_by_decode else Keeper.DECODE
        num_prefill_blocks = sum(worker.num_blocks for worker in fleet.prefill)
        num_decode_blocks = sum(worker.num_blocks for worker in fleet.decode)
        self._dealt += num_prefill_blocks / (num_prefill_blocks + num_decode_blocks)
        if self._dealt >= 1.0:
            self._dealt -= 1.0
            return Keeper.PREFILL
        return Keeper.DECODE


def _sources(request: RouteRequest, fleet: FleetView) -> list[tuple[int, WorkerId]]:
    """Return the (blocks, worker) that hold most of the prompt, best first."""
    held = ((blocks, worker_id) for worker_id, blocks in request.cached_blocks.items() if worker_id in fleet.sources)
    return heapq.nlargest(SHORTLIST, held)


def _compute(
    request: RouteRequest,
    fleet: FleetView,
    sources: Iterable[tuple[int, WorkerId]],
    worker: WorkerLoad,
    *,
    work_price: float,
) -> _Compute:
    """Return the best way for one worker: by itself, or with a pull first."""
    timing, num_tokens = worker.timing, request.num_tokens
    wait_s = worker.prefill_wait_s(request.now_s)
    own_blocks = min(request.cached_blocks.get(worker.worker_id, 0), request.num_usable_blocks)
    cached = own_blocks * request.block_size
    decodes = {"num_decodes": worker.num_decodes, "num_context_tokens": worker.num_context_tokens}
    compute_s = timing.prefill_s(num_tokens - cached, cached, **decodes)
    best = _Compute(worker, wait_s + (1 + work_price) * compute_s, wait_s, 0.0, compute_s, cached, None)
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
            best = _Compute(worker, cost, wait_s, pull_s, compute_s, cached, pull)
    return best


def _token_price(request: RouteRequest, decode: WorkerLoad) -> float:
    """Return what the answer costs on a decode worker: its own tokens, and the delay of everybody else's."""
    before, after = _gaps(request, decode)
    others = (after - before) * decode.num_decodes / 2  # half of their answers is still to come
    return (after + others) * request.num_output_tokens + _missed_gaps(request, decode, before, after)


def _gaps(request: RouteRequest, decode: WorkerLoad) -> tuple[float, float]:
    """Return the gap between tokens without and with the newcomer."""
    timing, num, context = decode.timing, decode.num_decodes, decode.num_context_tokens
    before = timing.itl_s(num, context) if num else 0.0
    after = timing.itl_s(num + request.num_samples, context + request.num_samples * request.num_tokens)
    return before, after


def _missed_gaps(request: RouteRequest, decode: WorkerLoad, before: float, after: float) -> float:
    newly_missed = _probably(after, request.itl_slo_s) - _probably(before, request.itl_slo_s)
    num_missed = _probably(after, request.itl_slo_s) + max(0.0, newly_missed) * decode.num_decodes
    return MISS_PRICE * _miss_unit(request) * num_missed


def _missed_first_token(request: RouteRequest, ready_s: float) -> float:
    return MISS_PRICE * _miss_unit(request) * _probably(request.waited_s + ready_s, request.ttft_slo_s)


def _miss_unit(request: RouteRequest) -> float:
    return request.ttft_slo_s if request.ttft_slo_s != float("inf") else 1.0


def _probably(predicted_s: float, objective_s: float) -> float:
    """Return how probably the objective is missed: predictions err by a tenth or two."""
    if objective_s == float("inf"):
        return 0.0
    return min(1.0, max(0.0, (predicted_s / objective_s - 0.8) / 0.4))


def _remote_option(
    request: RouteRequest, fleet: FleetView, compute: _Compute, decode: WorkerLoad, token_price: float
) -> _Option:
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
        "transfer": max(last_s, transfer_s - compute.compute_s),
        "tokens": token_price,
        "missed": _missed_first_token(request, compute.ready_s),
    }
    return _Option(compute, decode, False, terms, _gaps(request, decode)[1])


def _local_option(request: RouteRequest, compute: _Compute, decode: WorkerLoad) -> _Option:
    terms = {
        "wait": compute.wait_s,
        "pull": max(0.0, compute.pull_s - compute.wait_s),
        "compute": compute.compute_s,
        "work": (1.0 + decode.num_decodes) * compute.compute_s,
        "tokens": _token_price(request, decode),
        "missed": _missed_first_token(request, compute.ready_s),
    }
    return _Option(compute, decode, True, terms, _gaps(request, decode)[1])


def _candidate(option: _Option) -> Candidate:
    pull = option.compute.pull
    return Candidate(
        kind=PlanKind.LOCAL if option.is_local else PlanKind.REMOTE,
        prefill=None if option.is_local else option.compute.worker.worker_id,
        decode=option.decode.worker_id,
        source=None if pull is None else pull.source,
        cost=option.cost,
        terms=option.terms,
    )


def _reason(request: RouteRequest, option: _Option) -> str:
    compute = option.compute
    pulled = "" if compute.pull is None else f", {compute.pull.num_blocks} blocks from {compute.pull.source}"
    return (
        f"{request.num_tokens - compute.num_cached_tokens} tokens to compute in {compute.compute_s * 1e3:.0f} ms"
        f" after {max(compute.wait_s, compute.pull_s) * 1e3:.0f} ms{pulled};"
        f" {option.itl_s * 1e3:.1f} ms between tokens"
    )


def _no_pages(request: RouteRequest, fleet: FleetView) -> Refused:
    if not fleet.decode:
        return Refused(reason="no decode worker is available", retry_after_s=1.0)
    most = max(worker.num_free_blocks for worker in fleet.decode)
    reason = f"no decode worker has {request.num_decode_blocks} free pages; the most is {most}"
    return Refused(reason=reason, retry_after_s=1.0)

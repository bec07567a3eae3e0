"""Our own policy: the plan that costs the least, in seconds.

For a prefill worker P and a decode worker D, and for a decode worker that computes the prompt by itself:

    remote(P, D) = first token on P + work(P) + exposed transfer(P → D) + tokens(D) + missed(P, D)
    local(D)     = first token on D + work(D)                           + tokens(D) + missed(D)

- *First token*: max(wait, pull) + compute. The wait is for prompts accepted before, as the worker's own model and the
  bookings since its last report predict. A pull fetches leading blocks from the worker that holds most of them, and
  goes on during the wait; it is planned when computing them would take longer.
- *Work*: what the computation takes from others: half of it on a prefill worker, all of it from every sequence that
  decodes on a worker which does both.
- *Exposed transfer*: the part of the handoff that the computation cannot hide.
- *Tokens*: the newcomer's own answer at the gap between tokens that it will see, and what it adds to the gaps of all
  that decode there already.
- *Missed*: objectives that will probably be missed, the newcomer's and those of the sequences that it slows down, each
  priced at a multiple of the objective, so that it outweighs everything else.

A plan whose wait is longer than `max_wait_s` is not made yet: the request stays in the router's line, where the order
can still change and where the next worker that is free, whichever that will be, takes the one that needs it most.

One copy is enough: after a handoff the same blocks lie on both workers. One of them keeps them for later, the other
lets them go first, so that both pools together hold twice as many different blocks; a pull brings them to where they
are needed. The worker that had them keeps them; new ones are dealt out by the sizes of the pools (cf. singlets in
cooperative caching: Dahlin et al., OSDI 1994).
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import Refused
from common.ids import WorkerId
from router.placement.plans import Candidate, FleetView, Keeper, Plan, PlanKind, RouteRequest, WorkerLoad
from router.placement.prices import (
    MIN_PULLED_BLOCKS,
    PREFILL_WORK_PRICE,
    Compute,
    Option,
    compute_on,
    local_option,
    remote_option,
    token_price,
)

SHORTLIST = 4
"""Workers of each pool that are compared in pairs, after each was ranked by itself."""
NETWORK_S = 1e-3
"""What calls add to a first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictiveSettings:
    """Bounds of the policy."""

    local_prefill_max_tokens: int
    """Uncached tokens that a decode worker computes itself although there are prefill workers."""
    max_wait_s: float
    """Longest wait at a worker; whoever would wait longer waits in the router's line."""


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
    ) -> Iterator[Option]:
        if not prefills:
            return
        computes = (compute_on(request, fleet, sources, prefill, work_price=PREFILL_WORK_PRICE) for prefill in prefills)
        best_prefills = heapq.nsmallest(SHORTLIST, computes, key=lambda compute: compute.cost)
        priced = (
            (token_price(request, decode), -request.cached_tokens(decode.worker_id), decode) for decode in decodes
        )
        best_decodes = heapq.nsmallest(SHORTLIST, priced, key=lambda entry: entry[:2])
        for compute in best_prefills:
            for price, _cached, decode in best_decodes:
                yield remote_option(request, fleet, compute, decode, price)

    def _local(
        self,
        request: RouteRequest,
        fleet: FleetView,
        sources: Sequence[tuple[int, WorkerId]],
        decodes: Sequence[WorkerLoad],
        *,
        has_prefill: bool,
    ) -> Iterator[Option]:
        computes: list[Compute] = []
        for decode in decodes:
            if has_prefill and request.missing_tokens(decode.worker_id) > self._settings.local_prefill_max_tokens:
                continue
            computes.append(compute_on(request, fleet, sources, decode, work_price=1.0 + decode.num_decodes))
        for compute in heapq.nsmallest(SHORTLIST, computes, key=lambda compute: compute.cost):
            yield local_option(request, compute, compute.worker)

    def _plan(self, request: RouteRequest, fleet: FleetView, options: Sequence[Option]) -> Plan:
        best = options[0]
        compute, decode = best.compute, best.decode
        prefill = None if best.kind is PlanKind.LOCAL else compute.worker.worker_id
        return Plan(
            kind=best.kind,
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

    def _keeper(self, request: RouteRequest, fleet: FleetView, compute: Compute, decode: WorkerLoad) -> Keeper:
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
    most = heapq.nlargest(SHORTLIST, held)
    # What a worker was only sent to compute may be waited for there, but cannot be fetched from there yet.
    return [(request.pullable_blocks(worker_id), worker_id) for _blocks, worker_id in most]


def _candidate(option: Option) -> Candidate:
    pull = option.compute.pull
    return Candidate(
        kind=option.kind,
        prefill=None if option.kind is PlanKind.LOCAL else option.compute.worker.worker_id,
        decode=option.decode.worker_id,
        source=None if pull is None else pull.source,
        cost=option.cost,
        terms=option.terms,
    )


def _reason(request: RouteRequest, option: Option) -> str:
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

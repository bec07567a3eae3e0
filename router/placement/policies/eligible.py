"""Which workers of a view could serve a request, and the two kinds of plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import RefusalCause, Refused
from router.placement.plans import Candidate, FleetView, Plan, PlanKind, RouteRequest, WorkerLoad
from router.placement.policies.interface import RETRY_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligible:
    """The workers that could serve one request now."""

    prefill: Sequence[WorkerLoad]
    """That could hold the prompt."""
    decode: Sequence[WorkerLoad]
    """With enough free pages; at least one."""
    must_be_local: bool
    """No prefill worker could ever compute the prompt."""


def find_eligible(request: RouteRequest, fleet: FleetView) -> Eligible | Refused:
    """Return the workers that can serve the request, or why none can write its answer."""
    if not fleet.decode:
        return refuse("no decode worker is available")
    decode = tuple(worker for worker in fleet.decode if worker.num_free_blocks >= request.num_decode_blocks)
    if not decode:
        free = max(worker.num_free_blocks for worker in fleet.decode)
        return refuse(f"no decode worker has {request.num_decode_blocks} free pages; the most is {free}")
    prefill = tuple(worker for worker in fleet.prefill if worker.num_blocks >= request.num_prefill_blocks)
    none_is_large_enough = bool(fleet.prefill) and not prefill
    return Eligible(prefill=prefill, decode=decode, must_be_local=fleet.num_prefill == 0 or none_is_large_enough)


def refuse(reason: str) -> Refused:
    """Return a refusal that holds until something changes."""
    return Refused(reason=reason, retry_after_s=RETRY_AFTER_S)


def refuse_without_prefill() -> Refused:
    """Return the refusal of a prompt that needs a prefill worker while none may be chosen."""
    return refuse("no prefill worker is available")


def refuse_busy(wait_s: float, max_wait_s: float) -> Refused:
    """Return the refusal of a prompt that waits in the router's line until a worker can begin with it soon."""
    return Refused(
        reason=f"every worker is busy with prompts for {wait_s:.1f} s",
        retry_after_s=wait_s - max_wait_s,
        cause=RefusalCause.BUSY,
    )


def make_plan(
    request: RouteRequest,
    prefill: WorkerLoad | None,
    decode: WorkerLoad,
    *,
    candidates: Callable[[], tuple[Candidate, ...]] = tuple,
    num_candidates: int = 1,
) -> Plan:
    """Return the plan of a policy that predicts no times; it is local without a prefill worker."""
    computes = decode if prefill is None else prefill
    missing = request.missing_tokens(computes.worker_id)
    queued = computes.num_pending_prefill_tokens
    return Plan(
        kind=PlanKind.LOCAL if prefill is None else PlanKind.REMOTE,
        decode=decode.worker_id,
        prefill=None if prefill is None else prefill.worker_id,
        predicted_cached_tokens=request.cached_tokens(computes.worker_id),
        reason=f"{missing} tokens to compute behind {queued} queued, {decode.num_sequences} sequences decoding",
        candidates=candidates,
        num_candidates=num_candidates,
    )

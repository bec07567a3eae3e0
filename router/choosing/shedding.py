"""Refuses requests that no worker can serve in time, by what is predicted for their first token."""

import enum
import math
from collections.abc import Iterator

from common.errors import RefusalCause, Refused
from router.placement.limits import retry_after
from router.placement.loads import ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest, Plan

NUM_SOONEST = 4
"""Workers of each pool that are looked at because they are free soonest."""
NUM_HOLDERS = 8
"""Workers that are looked at because they hold most of the prompt."""


class Shed(enum.Enum):
    """Requests that are refused because no worker can serve them in time."""

    NONE = "none"
    DEADLINE = "deadline"
    """Requests whose first token would come after the caller's own deadline."""
    SLO = "slo"
    """Requests of `DEADLINE`, and those that would miss their objective for the time to first token."""


def find_hopeless(
    request: PlacementRequest,
    plan: Plan | Refused,
    view: FleetView,
    *,
    shed: Shed,
    error: float = 1.0,
    place_s: float = 0.0,
) -> Refused | None:
    """Return a final refusal when no worker of the view can bring the first token in time.

    The prediction of the policy counts; without one, the least time that any worker would need for its queue and the
    computation, which begins no sooner than in `place_s`, when a decode worker has a place. Predictions for workers
    without measurements do not count. Most actual times are below `error` times the predicted one; a request is refused
    for its objective when that would be late.
    """
    if shed is Shed.NONE:
        return None
    left_s = request.ttft_slo_s - request.waited_s if shed is Shed.SLO else math.inf
    ttft_s = _late_ttft_s(request, plan, view, left_s=min(left_s / error, request.time_left_s), place_s=place_s)
    if ttft_s is None:
        return None
    if ttft_s > request.time_left_s:
        return _refusal(ttft_s, request.time_left_s, RefusalCause.DEADLINE, "the caller's deadline")
    return _refusal(ttft_s, left_s, RefusalCause.SLO, f"the objective of {request.ttft_slo_s:g} s")


def _late_ttft_s(
    request: PlacementRequest, plan: Plan | Refused, view: FleetView, *, left_s: float, place_s: float
) -> float | None:
    """Return the predicted time to the first token; None when it is in time or not known."""
    if isinstance(plan, Plan) and plan.predicted_ttft_s is not None:
        computes = (view.decode if plan.prefill is None else view.prefill).find(plan.computes)
        is_late = plan.predicted_ttft_s > left_s and computes is not None and _is_measured(computes)
        return plan.predicted_ttft_s if is_late else None
    least_s = math.inf
    for worker in _quickest(request, view):
        ttft_s = max(place_s, worker.prefill_wait_s(request.now_s)) + _prefill_s(request, worker)
        if ttft_s <= left_s or not _is_measured(worker):
            return None
        least_s = min(least_s, ttft_s)
    return least_s if least_s != math.inf else None


def _quickest(request: PlacementRequest, view: FleetView) -> Iterator[ProjectedLoad]:
    """Yield workers of which one is the first to compute the prompt: those free soonest and those that hold most of it.

    Any other waits longer and computes more; among many workers it is not worth a look.
    """
    for pool in (view.prefill, view.decode):
        yield from pool.soonest(NUM_SOONEST)
        yield from filter(None, (pool.find(worker_id) for _blocks, worker_id in request.best_holders(NUM_HOLDERS)))


def _is_measured(worker: ProjectedLoad) -> bool:
    return worker.timing.prefill.is_measured


def _prefill_s(request: PlacementRequest, worker: ProjectedLoad) -> float:
    cached = request.cached_tokens(worker.worker_id)
    return worker.timing.prefill_s(request.num_tokens - cached, cached)


def _refusal(ttft_s: float, left_s: float, cause: RefusalCause, what: str) -> Refused:
    reason = f"the first token is predicted in {ttft_s:.2f} s; {what} leaves {max(left_s, 0.0):.2f} s"
    # The excess has to be worked off first.
    return Refused(reason=reason, retry_after_s=retry_after(ttft_s - left_s), cause=cause)

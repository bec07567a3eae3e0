"""Refusals of requests that no worker can serve in time, so that no prompt is computed in vain."""

import enum

from common.errors import RefusalCause, Refused
from common.timing import GUESSED_TIMING
from router.admission.limits import retry_after
from router.placement.plans import FleetView, PlacementRequest, Plan, WorkerLoad


class Shed(enum.Enum):
    """Requests that are refused because no worker can serve them in time."""

    NONE = "none"
    DEADLINE = "deadline"
    """Requests whose first token would come after the caller's own deadline."""
    SLO = "slo"
    """Also requests that would miss their objective for the time to first token."""


def find_hopeless(request: PlacementRequest, plan: Plan | Refused, view: FleetView, *, shed: Shed) -> Refused | None:
    """Return a final refusal when no worker of the view can bring the first token in time.

    The prediction of the policy counts; without one, the least time that any worker would need for its queue and the
    computation. Predictions for workers without measurements do not count.
    """
    if shed is Shed.NONE:
        return None
    ttft_s = _predicted_ttft_s(request, plan, view)
    if ttft_s is None:
        return None
    if ttft_s > request.time_left_s:
        return _refusal(ttft_s, request.time_left_s, RefusalCause.DEADLINE, "the caller's deadline")
    left_s = request.ttft_slo_s - request.waited_s
    if shed is Shed.SLO and ttft_s > left_s:
        return _refusal(ttft_s, left_s, RefusalCause.SLO, f"the objective of {request.ttft_slo_s:g} s")
    return None


def _predicted_ttft_s(request: PlacementRequest, plan: Plan | Refused, view: FleetView) -> float | None:
    workers = (*view.prefill, *view.decode)
    if isinstance(plan, Plan) and plan.predicted_ttft_s is not None:
        computes = next(worker for worker in workers if worker.worker_id == plan.computes)
        return plan.predicted_ttft_s if _is_measured(computes) else None
    if not workers or not all(map(_is_measured, workers)):
        return None
    return min(_least_ttft_s(request, worker) for worker in workers)


def _is_measured(worker: WorkerLoad) -> bool:
    return worker.timing.prefill != GUESSED_TIMING.prefill


def _least_ttft_s(request: PlacementRequest, worker: WorkerLoad) -> float:
    cached = request.cached_tokens(worker.worker_id)
    return worker.prefill_wait_s(request.now_s) + worker.timing.prefill_s(request.num_tokens - cached, cached)


def _refusal(ttft_s: float, left_s: float, cause: RefusalCause, what: str) -> Refused:
    reason = f"the first token is predicted in {ttft_s:.2f} s; {what} leaves {max(left_s, 0.0):.2f} s"
    # The excess has to be worked off first.
    return Refused(reason=reason, retry_after_s=retry_after(ttft_s - left_s), cause=cause)

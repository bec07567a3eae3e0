"""Which decode workers may take another request without breaking the gaps between the tokens of the answers there.

A decode worker is *closed* to a request when gaps in the larger batch would be longer than

- the objective of running answers that keep it now (`ProjectedLoad.tpot_slos`), or
- an objective of the request that it could keep alone.

The gap in the larger batch is what the timing model of the worker predicts, times the factor by which most gaps have
exceeded their prediction lately (`PlacementRequest.gap_error`): with exact ones, a worker is filled to the objective.
Prompts that the worker computes do not count here: without prefill workers its scheduler gives them no more of a step
than the objectives of the answers allow (engine/steps/budget.py), and with them the policy prices the delay. The model
is fitted to what steps really take, and the batch comes with every report, so that an error corrects itself. A worker
on which nothing decodes is open to every request.
"""

from collections.abc import Sequence

from common.errors import RefusalCause
from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest, TooSlow
from router.placement.policies.eligible import RETRY_AFTER_S


def keep_gaps(request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> Sequence[ProjectedLoad] | TooSlow:
    """Return the workers, at least one, that are open to the request, or a refusal when all are closed."""
    spared = [worker for worker in workers if _spares_others(request, worker)]
    open_workers = [worker for worker in spared if _suits(request, worker)]
    if open_workers:
        return open_workers
    gap_s = min(_gap_s(request, worker) for worker in workers)
    return TooSlow(
        reason=f"with another answer, every decode worker would take {gap_s * 1e3:.0f} ms or more for a token",
        retry_after_s=RETRY_AFTER_S,
        # One that is only too fast for the workers as they are leaves them to others.
        cause=RefusalCause.NO_ROOM if spared else RefusalCause.SATURATED,
    )


def _spares_others(request: PlacementRequest, worker: ProjectedLoad) -> bool:
    if not _is_known(worker):
        return True
    before_s = worker.timing.itl_s(worker.num_decodes, worker.num_context_tokens)
    after_s = request.gap_error * _gap_s(request, worker)
    return not any(before_s <= slo_s < after_s for slo_s in worker.tpot_slos)


def _suits(request: PlacementRequest, worker: ProjectedLoad) -> bool:
    if not _is_known(worker) or request.gap_error * _gap_s(request, worker) <= request.tpot_slo_s:
        return True
    alone_s = worker.timing.itl_s(request.num_samples, request.num_samples * request.num_tokens)
    return alone_s > request.tpot_slo_s


def _is_known(worker: ProjectedLoad) -> bool:
    return worker.num_decodes > 0 and worker.timing.decode.is_measured


def _gap_s(request: PlacementRequest, worker: ProjectedLoad) -> float:
    """Return the gap between tokens on the worker with the request."""
    num_context_tokens = worker.num_context_tokens + request.num_samples * request.num_tokens
    return worker.timing.itl_s(worker.num_decodes + request.num_samples, num_context_tokens)

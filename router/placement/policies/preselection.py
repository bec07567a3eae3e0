"""In a large fleet only a few workers are worth pricing: cheap looks at all of them find those."""

import heapq
from collections.abc import Sequence

from router.placement.plans import RouteRequest, WorkerLoad
from router.placement.policies.turns import Turns

NUM_EACH = 6
"""Workers that are taken for each virtue."""
SMALL = 3 * NUM_EACH
"""So many are all priced."""


def preselect(request: RouteRequest, workers: Sequence[WorkerLoad], turns: Turns) -> Sequence[WorkerLoad]:
    """Return the workers that could be the cheapest ones: those free soonest, those that hold most of the prompt and
    those that decode least; among equals those chosen longest ago. About 1 µs a worker.
    """
    if len(workers) <= SMALL:
        return workers
    now_s, cached, last_turn = request.now_s, request.cached_blocks, turns.last_turn
    soonest = heapq.nsmallest(
        NUM_EACH, workers, key=lambda w: (max(now_s, w.prefill_free_at_s), last_turn(w.worker_id))
    )
    emptiest = heapq.nsmallest(NUM_EACH, workers, key=lambda w: (w.num_decodes, w.num_context_tokens))
    fullest = heapq.nlargest(NUM_EACH, workers, key=lambda w: cached.get(w.worker_id, 0)) if cached else []
    return list({worker.worker_id: worker for worker in (*soonest, *emptiest, *fullest)}.values())

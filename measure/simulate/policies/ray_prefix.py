"""`ray_prefix`: the deepest match, whatever the load.

    match rate >= 0.1: of the workers with the longest match, the one with the shortest queue
    else:              of those that have been sent the fewest tokens so far, the one with the shortest queue

Source: Ray Serve LLM's `PrefixCacheAffinityRouter`. Its default `imbalanced_threshold` is infinite, so the fall-back to
power of two never happens and is left out. The queue is the requests in flight. Each deployment routes by itself, so
prefill and decode both use it.

Adapted: our prefix index, in tokens, stands for its tree of characters. The tree's own measure of a replica, which
without eviction (the default) only grows, is kept as the tokens that each worker was sent and did not hold.
"""

from collections.abc import Sequence

from common.ids import WorkerId
from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.placement.policies.pooled import Score, Selector

MATCH_RATE_THRESHOLD = 0.1


class RayPrefix(Selector):
    """The longest match, else the smallest tree."""

    def __init__(self) -> None:
        super().__init__()
        self._sent_tokens: dict[WorkerId, int] = {}

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return scores by match, or by tokens sent."""
        best = max(request.cached_blocks.get(worker.worker_id, 0) for worker in workers) * request.block_size
        is_match = best >= MATCH_RATE_THRESHOLD * request.num_tokens
        return [self._by_match(request, worker) if is_match else self._by_size(worker) for worker in workers]

    def note(self, request: PlacementRequest, worker: ProjectedLoad) -> None:
        """Grow the worker's tree by the tokens that were new to it."""
        worker_id = worker.worker_id
        self._sent_tokens[worker_id] = self._sent_tokens.get(worker_id, 0) + request.missing_tokens(worker_id)

    def _by_match(self, request: PlacementRequest, worker: ProjectedLoad) -> Score:
        matched = float(request.cached_blocks.get(worker.worker_id, 0))
        terms = {"matched_blocks": matched, "requests": float(worker.num_active_requests)}
        return Score(worker=worker, cost=-matched, then=(worker.num_active_requests,), terms=terms)

    def _by_size(self, worker: ProjectedLoad) -> Score:
        sent = float(self._sent_tokens.get(worker.worker_id, 0))
        terms = {"sent_tokens": sent, "requests": float(worker.num_active_requests)}
        return Score(worker=worker, cost=sent, then=(worker.num_active_requests,), terms=terms)

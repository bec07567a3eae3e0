"""`sglang_cache_aware` and `sglang_cache_aware_events`: affinity while the load is even, else the least load.

    imbalanced = max(load) - min(load) > 64  and  max(load) > 1.5 * min(load)
    imbalanced:                   least load
    cached share of prompt > 0.3: the longest match                                  (sglang_cache_aware)
    any match:                    the longest, then least load, then fewest cached   (sglang_cache_aware_events)
    else:                         least load

The load is the requests in flight that this router knows of. Among equal loads the first of the view wins, among equal
matches the first, with events the last. Disaggregated, the default pairs the rule with `power_of_two` for decode.

Source: SGLang's router, now the Model Gateway (SMG), `cache_aware`, with the defaults of its command line. Its mode fed
by KV events has no threshold: a template's first block, which all prompts share, draws everything to one worker until
the load is uneven. Without events, as it is mostly run, the threshold holds.

Adapted: our exact prefix index stands for its tree of what was sent where, and what a worker reports as cached for the
size of its tree. The conditions on token usage are off by default and left out.
"""

from collections.abc import Sequence

from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.placement.policies.pooled import Score, Selector

BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
CACHE_THRESHOLD = 0.3


class CacheAware(Selector):
    """The longest match if it is a large enough part of the prompt."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return scores by match, or by load."""
        matches = [request.cached_blocks.get(worker.worker_id, 0) for worker in workers]
        if _is_imbalanced(workers) or not self._is_enough(request, max(matches)):
            return [_by_load(worker) for worker in workers]
        pairs = zip(workers, matches, strict=True)
        return [self._by_match(worker, match, place) for place, (worker, match) in enumerate(pairs)]

    def _is_enough(self, request: PlacementRequest, match: int) -> bool:
        return match * request.block_size > CACHE_THRESHOLD * request.num_tokens

    def _by_match(self, worker: ProjectedLoad, match: int, place: int) -> Score:
        return Score(worker=worker, cost=-float(match), terms={"matched_blocks": float(match)})


class CacheAwareEvents(CacheAware):
    """The longest match of any length."""

    def _is_enough(self, request: PlacementRequest, match: int) -> bool:
        return match > 0

    def _by_match(self, worker: ProjectedLoad, match: int, place: int) -> Score:
        then = (worker.num_active_requests, worker.num_cached_blocks, -place)
        terms = {"matched_blocks": float(match), "requests": float(worker.num_active_requests)}
        return Score(worker=worker, cost=-float(match), then=then, terms=terms)


def _is_imbalanced(workers: Sequence[ProjectedLoad]) -> bool:
    loads = [worker.num_active_requests for worker in workers]
    high, low = max(loads), min(loads)
    return high - low > BALANCE_ABS_THRESHOLD and high > BALANCE_REL_THRESHOLD * low


def _by_load(worker: ProjectedLoad) -> Score:
    load = float(worker.num_active_requests)
    return Score(worker=worker, cost=load, terms={"requests": load})

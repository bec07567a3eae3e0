"""`lmetric`: tokens to compute, times requests in the batch.

    cost = P-token * BS         the lowest wins, ties by lot

P-token are the prompt's tokens that the worker would have to compute, BS is its number of requests with this one.

Source: LMetric (arXiv 2603.15202), whose abstract names the two factors; BS counts the request itself, and P-token only
this request's tokens, as in the scorer that llm-d's router proposes after the paper's section 5.1. `dynamo_lmetric` is
Dynamo's reading, with the tokens that are queued and the blocks of the batch. Adapted: the product is 0 on every decode
worker of a disaggregated fleet, so BS alone decides there.
"""

import random
from collections.abc import Sequence

from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.placement.policies.pooled import Score, Selector


class Lmetric(Selector):
    """Minimizes the product."""

    def __init__(self, *, computes: bool, rng: random.Random) -> None:
        """`computes`: whether the workers compute prompts."""
        super().__init__(rng=rng)
        self._computes = computes

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return the products."""
        return [self._score(request, worker) for worker in workers]

    def _score(self, request: PlacementRequest, worker: ProjectedLoad) -> Score:
        tokens = float(request.missing_tokens(worker.worker_id)) if self._computes else 1.0
        batch = worker.num_active_requests + 1.0
        return Score(worker=worker, cost=tokens * batch, terms={"missing_tokens": tokens, "batch": batch})

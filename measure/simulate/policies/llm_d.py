"""`llm_d`: a weighted sum of normalized scores.

    total  = weight_queue * queue + weight_kv * kv + weight_prefix * prefix        the highest wins, ties by lot
    queue  = (max waiting - waiting) / (max waiting - min waiting)                  1 when all are equal
    kv     = 1 - share of KV in use
    prefix = matched blocks / blocks of the prompt

Weights: queue 2, kv 2, prefix 3 (default profile); queue 1, prefix 2 in both pools of a disaggregated fleet (P/D sample
profile). There the decode worker is chosen first; a prefill worker joins when at least 16 tokens are missing on it.

Source: llm-d's router: queue-scorer, kv-cache-utilization-scorer, prefix-cache-scorer, max-score picker,
prefix-based-pd-decider. Adapted: our exact prefix index; waiting sequences are those of the worker's last report, with
those that wait for their KV, as vLLM counts them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.placement.policies.pooled import Score, Selector
from router.placement.policies.simple import kv_usage

NON_CACHED_TOKENS = 16
"""Fewest missing tokens that make it worth to disaggregate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the scores."""

    queue: float
    kv: float
    prefix: float


UNIFIED = Weights(queue=2.0, kv=2.0, prefix=3.0)
DISAGGREGATED = Weights(queue=1.0, kv=0.0, prefix=2.0)


class LlmD(Selector):
    """Maximizes the weighted sum."""

    def __init__(self, weights: Weights, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._weights = weights

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return the negated sums."""
        waiting = [worker.num_waiting for worker in workers]
        most, spread = max(waiting), max(waiting) - min(waiting)
        return [
            self._score(request, worker, queue=(most - worker.num_waiting) / spread if spread else 1.0)
            for worker in workers
        ]

    def _score(self, request: PlacementRequest, worker: ProjectedLoad, *, queue: float) -> Score:
        total = request.num_prefill_blocks
        prefix = min(request.cached_blocks.get(worker.worker_id, 0) / total, 1.0) if total else 0.0
        terms = {
            "queue_score": self._weights.queue * queue,
            "kv_score": self._weights.kv * (1.0 - kv_usage(worker)),
            "prefix_score": self._weights.prefix * prefix,
        }
        return Score(worker=worker, cost=-sum(terms.values()), terms=terms)

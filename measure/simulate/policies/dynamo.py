"""`dynamo` and `dynamo_lmetric`: blocks to compute, and blocks that decode reads.

    prefill_w = max((active_prefill_tokens_w + prompt) / block_size - hit_w, 0)
    decode_w  = active_blocks_w + blocks of this request
    linear    = prefill_w + decode_w
    lmetric   = prefill_w * (decode_w + 1)

The lowest cost wins, ties by lot (temperature 0). A stage of a disaggregated fleet leaves terms out: its prefill has no
decode term (`track_active_blocks=false`), its decode is pure load (`overlap_score_credit=0`,
`track_prefill_tokens=false`).

Source: NVIDIA Dynamo's KV router; defaults: overlap credit 1, prefill load scale 1, no credit decay, no weight per
request. Active prefill tokens are those that the requests sent to the worker were predicted to compute, in full until
their first token; active blocks are those of all its requests.

Adapted: one tier of cache; blocks shared by active requests count for each of them, where Dynamo counts them once. The
product of `lmetric` would be 0 on every decode worker of a disaggregated fleet; there the decode term alone decides.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.placement.policies.pooled import Score, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Weights of the terms in one stage."""

    prefill: float
    decode: float


WHOLE = Stage(prefill=1.0, decode=1.0)
PREFILL = Stage(prefill=1.0, decode=0.0)
DECODE = Stage(prefill=0.0, decode=1.0)


class DynamoLinear(Selector):
    """Minimizes the sum of both terms."""

    def __init__(self, stage: Stage, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self._stage = stage

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return the costs in blocks."""
        return [self._score(request, worker) for worker in workers]

    def _score(self, request: PlacementRequest, worker: ProjectedLoad) -> Score:
        tokens = worker.num_active_missing_tokens + request.num_tokens
        hit = request.cached_blocks.get(worker.worker_id, 0)
        prefill = self._stage.prefill * max(tokens / request.block_size - hit, 0.0)
        decode = self._stage.decode * (worker.num_active_blocks + request.num_decode_blocks)
        terms = {"prefill_blocks": prefill, "decode_blocks": decode}
        return Score(worker=worker, cost=self._combine(prefill, decode), terms=terms)

    def _combine(self, prefill: float, decode: float) -> float:
        return prefill + decode


class DynamoLmetric(DynamoLinear):
    """Minimizes the product where both terms count."""

    def _combine(self, prefill: float, decode: float) -> float:
        if not self._stage.prefill:
            return decode
        return prefill * (decode + 1.0)

"""Reference policies: `random`, `round_robin`, `power_of_two`, `least_load`, `longest_prefix`.

| policy | among the workers of a pool |
|---|---|
| random | by lot |
| round robin | the one chosen longest ago |
| power of two | two by lot, of these the one with less KV in use, the first drawn if equal (Mitzenmacher 2001; SMG) |
| least load | least seconds of queued work plus KV pressure, the first of equals (SMG) |
| longest prefix | longest match of more than one block, else the one chosen longest ago: the reference for hit rate |

SMG's least load: `score = (queued + in flight) / throughput + 0.15 * k / (1 - k)`, where *queued* are the uncached
tokens that wait by the worker's report, *in flight* those sent since, and k, at most 0.999, the share of KV in use.
The throughput is the published default for workers that report none, 2000 tokens/s: our reports have no rate of
generation. In flight counts a prompt's uncached tokens; SMG, which does not know them, counts all tokens.

A match of a single block is noise: prompts of one chat template all begin alike, and a rule that follows such a match
sends everything to one worker.
"""

import random
from collections.abc import Sequence

from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.placement.policies.eligible import Turns
from router.placement.policies.pooled import Score, Selector

KV_PRESSURE_S = 0.15
THROUGHPUT_TOKENS_PER_S = 2000.0
MAX_KV_USAGE = 0.999
MAX_NOISE_BLOCKS = 1


def kv_usage(worker: ProjectedLoad) -> float:
    """Return the share of a worker's pages that are in use; cached ones that may be evicted are free."""
    return 1.0 - worker.num_free_blocks / worker.num_blocks if worker.num_blocks else 1.0


class Random(Selector):
    """All workers score the same; the generator decides."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return equal scores."""
        return [Score(worker=worker, cost=0.0) for worker in workers]


class TurnSelector(Selector):
    """A selector that remembers whose turn it was."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns()

    def note(self, request: PlacementRequest, worker: ProjectedLoad) -> None:
        """End the worker's turn."""
        self._turns.take(worker.worker_id)


class RoundRobin(TurnSelector):
    """The worker chosen longest ago."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return scores by the turn of the last choice."""
        return [Score(worker=worker, cost=float(self._turns.last_turn(worker.worker_id))) for worker in workers]


class LongestPrefix(TurnSelector):
    """The worker with the longest match; among equals the one chosen longest ago."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return scores by match, then by turn."""
        return [self._score(request, worker) for worker in workers]

    def _score(self, request: PlacementRequest, worker: ProjectedLoad) -> Score:
        match = request.cached_blocks.get(worker.worker_id, 0)
        counted = float(match) if match > MAX_NOISE_BLOCKS else 0.0
        turn = self._turns.last_turn(worker.worker_id)
        return Score(worker=worker, cost=-counted, then=(turn,), terms={"matched_blocks": float(match)})


class PowerOfTwo(Selector):
    """The less used of two workers drawn by lot."""

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__()
        self._draws = rng

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return the pages in use of the two that were drawn."""
        drawn = self._draws.sample(workers, min(2, len(workers)))
        return [_by_used_blocks(worker) for worker in drawn]


class LeastLoad(Selector):
    """Least time to drain."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return seconds of queued work plus the KV pressure in seconds."""
        return [_by_drain_time(worker) for worker in workers]


def _by_used_blocks(worker: ProjectedLoad) -> Score:
    used = float(worker.num_blocks - worker.num_free_blocks)
    return Score(worker=worker, cost=used, terms={"used_blocks": used})


def _by_drain_time(worker: ProjectedLoad) -> Score:
    drain_s = worker.num_pending_prefill_tokens / THROUGHPUT_TOKENS_PER_S
    usage = min(kv_usage(worker), MAX_KV_USAGE)
    pressure_s = KV_PRESSURE_S * usage / (1.0 - usage)
    return Score(worker=worker, cost=drain_s + pressure_s, terms={"drain": drain_s, "kv_pressure": pressure_s})

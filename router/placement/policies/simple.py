"""Policies that know nothing of caches: `random`, `round_robin`, `power_of_two`, `least_load`.

| policy | among the workers of a pool |
|---|---|
| random | by lot |
| round robin | the one chosen longest ago |
| power of two | two by lot, of these the one with less KV in use, the first drawn if equal (Mitzenmacher 2001; SMG) |
| least load | least seconds of queued work plus KV pressure, the first of equals (SMG) |

SMG's least load: `score = (queued + in flight) / throughput + 0.15 * k / (1 - k)`, where *queued* are the uncached
tokens that wait by the worker's report, *in flight* what was sent since, and k, at most 0.999, the share of KV in use.
The throughput is the published default for workers that report none, 2000 tokens/s: our reports have no rate of
generation. In flight counts a prompt's uncached tokens, where SMG, which does not know them, counts all.
"""

import random
from collections.abc import Sequence

from router.placement.plans import RouteRequest, WorkerLoad
from router.placement.policies.pooled import Score, Selector, uniform
from router.placement.policies.turns import Turns

KV_PRESSURE_S = 0.15
THROUGHPUT_TOKENS_PER_S = 2000.0
MAX_KV_USAGE = 0.999


def kv_usage(worker: WorkerLoad) -> float:
    """Return the share of a worker's pages that are in use; cached ones that may be evicted are free."""
    return 1.0 - worker.num_free_blocks / worker.num_blocks if worker.num_blocks else 1.0


class Random(Selector):
    """By lot."""

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(ties=uniform(rng))

    def score(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> list[Score]:
        """All are equal."""
        return [Score(worker=worker, cost=0.0) for worker in workers]


class RoundRobin(Selector):
    """The one chosen longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns()

    def score(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> list[Score]:
        """By the turn of the last choice."""
        return [Score(worker=worker, cost=float(self._turns.last_turn(worker.worker_id))) for worker in workers]

    def note(self, request: RouteRequest, worker: WorkerLoad) -> None:
        """Its turn is over."""
        self._turns.take(worker.worker_id)


class PowerOfTwo(Selector):
    """The less used of two drawn by lot."""

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def score(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> list[Score]:
        """Pages in use, of those drawn alone."""
        drawn = self._rng.sample(workers, min(2, len(workers)))
        return [_by_used_blocks(worker) for worker in drawn]


class LeastLoad(Selector):
    """Least time to drain."""

    def score(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> list[Score]:
        """Seconds, and seconds' worth of KV pressure."""
        return [_by_drain_time(worker) for worker in workers]


def _by_used_blocks(worker: WorkerLoad) -> Score:
    used = float(worker.num_blocks - worker.num_free_blocks)
    return Score(worker=worker, cost=used, terms={"used_blocks": used})


def _by_drain_time(worker: WorkerLoad) -> Score:
    drain_s = worker.num_pending_prefill_tokens / THROUGHPUT_TOKENS_PER_S
    usage = min(kv_usage(worker), MAX_KV_USAGE)
    pressure_s = KV_PRESSURE_S * usage / (1.0 - usage)
    return Score(worker=worker, cost=drain_s + pressure_s, terms={"drain": drain_s, "kv_pressure": pressure_s})

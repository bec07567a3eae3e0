"""`aibrix`: the best match that is not overloaded.

Whole requests (`prefix-cache`). If some worker is far busier than the others, only the least busy ones may match:

    imbalanced = max(requests) > 2 * (mean + 1)  and  max(requests) - min(requests) >= 8
    the longest match, then the fewest requests, of those with requests <= mean + 1 standard deviation
    none matches: fewest requests

Prefill (`prefix_cache` score; workers above mean + 1 standard deviation are left out), decode (`load_balancing` score),
each the lowest:

    prefill = (100 - match in percent) * 0.1 + requests / max(requests)
    decode  = (requests / max(requests) + 1 - throughput / max(throughput)) / (free KV / max(free KV))

Before either score: more than 16 (prefill), at least 16 (decode) requests between the busiest and the least busy worker
send the request to the least busy one; so do more than 2048 tokens/s between the decode workers' throughputs, to the
slowest. Ties by lot.

Source: AIBrix's gateway plugins, defaults of the environment. Adapted: our prefix index; the fleet is one roleset;
throughput is what a worker's timing model predicts for its present batch; the rate at which requests drain is not
reported and its rule left out.
"""

from collections.abc import Callable, Sequence

import numpy as np

from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.placement.policies.pooled import Score, Selector
from router.placement.policies.simple import kv_usage

IMBALANCE_FACTOR = 2.0
IMBALANCE_MIN_GAP = 8
STANDARD_DEVIATION_FACTOR = 1.0
PREFILL_MIN_SPREAD = 16
DECODE_MIN_SPREAD = 16
THROUGHPUT_MIN_SPREAD = 2048.0
MIN_FREE_PERCENT = 0.1

Count = Callable[[ProjectedLoad], int]


class AibrixWhole(Selector):
    """Rule `prefix-cache`, for whole requests."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return scores by match among workers that are not overloaded, else by requests."""
        counts = [worker.num_active_requests for worker in workers]
        may_match = _least_busy(workers, _active) if _is_imbalanced(counts) else workers
        limit = _usual(counts)
        matching = [
            worker for worker in may_match if _match_percent(request, worker) and worker.num_active_requests <= limit
        ]
        if not matching:
            return [_by_count(worker, _active) for worker in workers]
        return [_by_match(request, worker) for worker in matching]


class AibrixPrefill(Selector):
    """Score `prefix_cache`, for a prefill pool."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return scores by match and by requests whose prompts are not computed yet."""
        counts = [worker.num_active_prefills for worker in workers]
        if max(counts) - min(counts) > PREFILL_MIN_SPREAD:
            return [_by_count(worker, _prefills) for worker in workers]
        most, limit = max(1, *counts), _usual(counts)
        usual = [worker for worker in workers if worker.num_active_prefills <= limit]
        return [_by_match_and_load(request, worker, most) for worker in usual]


class AibrixDecode(Selector):
    """Score `load_balancing`, for a decode pool."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return scores by requests, throughput and free KV."""
        counts = [worker.num_active_requests for worker in workers]
        if max(counts) - min(counts) >= DECODE_MIN_SPREAD:
            return [_by_count(worker, _active) for worker in workers]
        rates = [_throughput(worker) for worker in workers]
        if max(rates) - min(rates) > THROUGHPUT_MIN_SPREAD:
            return [
                Score(worker=worker, cost=rate, terms={"tokens_per_second": rate})
                for worker, rate in zip(workers, rates, strict=True)
            ]
        free = [max(100.0 * (1.0 - kv_usage(worker)), MIN_FREE_PERCENT) for worker in workers]
        most, fastest, freest = max(1, *counts), max(1.0, *rates), max(1.0, *free)
        return [
            _by_balance(worker, busy=count / most, slow=1.0 - rate / fastest, free=percent / freest)
            for worker, count, rate, percent in zip(workers, counts, rates, free, strict=True)
        ]


def _active(worker: ProjectedLoad) -> int:
    return worker.num_active_requests


def _prefills(worker: ProjectedLoad) -> int:
    return worker.num_active_prefills


def _is_imbalanced(counts: Sequence[int]) -> bool:
    high, low = max(counts), min(counts)
    return high > IMBALANCE_FACTOR * (sum(counts) / len(counts) + 1.0) and high - low >= IMBALANCE_MIN_GAP


def _usual(counts: Sequence[int]) -> float:
    """Return the most requests of a worker that is not overloaded."""
    return float(np.mean(counts) + STANDARD_DEVIATION_FACTOR * np.std(counts))


def _least_busy(workers: Sequence[ProjectedLoad], count: Count) -> list[ProjectedLoad]:
    low = min(count(worker) for worker in workers)
    return [worker for worker in workers if count(worker) == low]


def _match_percent(request: PlacementRequest, worker: ProjectedLoad) -> int:
    """Return the match as AIBrix's indexer reports it: whole percents of the prompt's full blocks."""
    full = request.num_tokens // request.block_size
    return min(100, 100 * request.cached_blocks.get(worker.worker_id, 0) // full) if full else 0


def _throughput(worker: ProjectedLoad) -> float:
    """Return tokens per second."""
    step_s = worker.timing.itl_s(worker.num_decodes, worker.num_context_tokens)
    return worker.num_decodes / step_s if step_s > 0.0 else 0.0


def _by_count(worker: ProjectedLoad, count: Count) -> Score:
    requests = float(count(worker))
    return Score(worker=worker, cost=requests, terms={"requests": requests})


def _by_match(request: PlacementRequest, worker: ProjectedLoad) -> Score:
    percent = float(_match_percent(request, worker))
    terms = {"match_percent": percent, "requests": float(worker.num_active_requests)}
    return Score(worker=worker, cost=-percent, then=(worker.num_active_requests,), terms=terms)


def _by_match_and_load(request: PlacementRequest, worker: ProjectedLoad, most: int) -> Score:
    terms = {
        "miss_score": (100 - _match_percent(request, worker)) * 0.1,
        "request_score": worker.num_active_prefills / most,
    }
    return Score(worker=worker, cost=sum(terms.values()), terms=terms)


def _by_balance(worker: ProjectedLoad, *, busy: float, slow: float, free: float) -> Score:
    terms = {"busy_score": busy, "slow_score": slow, "free_share": free}
    return Score(worker=worker, cost=(busy + slow) / free, terms=terms)

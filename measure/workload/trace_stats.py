"""What a trace is like, and what its prefixes could save: numbers by which replays are checked."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from measure.workload.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles of a length."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementHits:
    """What a placement finds in caches of limited size."""

    block_hit: float
    """Share of all blocks."""
    hot_spot: float
    """Workers times the largest worker's share of the missed blocks; 1 is even."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """Statistics of a trace. Blocks are counted with the partly filled last ones."""

    num_requests: int
    duration_s: float
    requests_per_s: float
    max_burst: int
    """Most arrivals within one second."""
    prompt_tokens: Spread
    output_tokens: Spread
    num_blocks: int
    num_unique_blocks: int
    infinite_cache_hit: float
    """Share of blocks that came before, behind nothing but blocks that came before."""
    share_beyond_first: float
    """Share of requests that find more than one block: the first is often a system prompt that all share."""


def trace_stats(trace: Trace) -> TraceStats:
    """Return the statistics of a trace that has requests."""
    seen: set[int] = set()
    num_hits = num_beyond = 0
    for request in trace.requests:
        num_found = _leading(request.block_ids, seen)
        num_hits += num_found
        num_beyond += num_found > 1
        seen.update(request.block_ids)
    num_requests = len(trace.requests)
    num_blocks = sum(len(request.block_ids) for request in trace.requests)
    return TraceStats(
        num_requests=num_requests,
        duration_s=trace.duration_s,
        requests_per_s=num_requests / trace.duration_s if trace.duration_s else float("inf"),
        max_burst=int(np.bincount([int(request.arrival_s) for request in trace.requests]).max()),
        prompt_tokens=_spread([request.num_prompt_tokens for request in trace.requests]),
        output_tokens=_spread([request.num_output_tokens for request in trace.requests]),
        num_blocks=num_blocks,
        num_unique_blocks=len(seen),
        infinite_cache_hit=num_hits / num_blocks,
        share_beyond_first=num_beyond / num_requests,
    )


def round_robin_hits(trace: Trace, *, num_workers: int, blocks_per_worker: int) -> PlacementHits:
    """Return what is found when every worker gets each request in turn."""
    return _place(trace, [LruBlocks(blocks_per_worker) for _ in range(num_workers)], lambda index, _found, _miss: index)


def sticky_hits(trace: Trace, *, num_workers: int, blocks_per_worker: int) -> PlacementHits:
    """Return what is found when a request goes where most of its prefix is.

    A match of one block counts as none, see `TraceStats.share_beyond_first`; a request without a match goes to the
    worker that has computed least.
    """

    def choose(_index: int, found: Sequence[int], missed: Sequence[int]) -> int:
        workers = range(len(found))
        best = max(workers, key=lambda worker: (found[worker], -missed[worker]))
        return best if found[best] > 1 else min(workers, key=lambda worker: missed[worker])

    return _place(trace, [LruBlocks(blocks_per_worker) for _ in range(num_workers)], choose)


class LruBlocks:
    """A cache of block ids: least recently used goes first, of one prompt its last blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def leading(self, block_ids: Sequence[int]) -> int:
        """Return how many leading blocks are there."""
        return _leading(block_ids, self._blocks)

    def use(self, block_ids: Sequence[int]) -> None:
        """Put a prompt's blocks in, as most recently used. A prompt that is too long keeps its leading blocks."""
        for block_id in reversed(block_ids[: self._capacity]):
            self._blocks[block_id] = None
            self._blocks.move_to_end(block_id)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def _place(
    trace: Trace, caches: list[LruBlocks], choose: Callable[[int, Sequence[int], Sequence[int]], int]
) -> PlacementHits:
    """Run a placement: `choose` gets the request's number, blocks found and blocks missed so far, by worker."""
    missed = [0] * len(caches)
    num_hits = num_blocks = 0
    for index, request in enumerate(trace.requests):
        found = [cache.leading(request.block_ids) for cache in caches]
        worker = choose(index, found, missed) % len(caches)
        caches[worker].use(request.block_ids)
        missed[worker] += len(request.block_ids) - found[worker]
        num_hits += found[worker]
        num_blocks += len(request.block_ids)
    return PlacementHits(
        block_hit=num_hits / num_blocks, hot_spot=len(caches) * max(missed) / sum(missed) if any(missed) else 1.0
    )


def _leading(block_ids: Sequence[int], present: "set[int] | OrderedDict[int, None]") -> int:
    for position, block_id in enumerate(block_ids):
        if block_id not in present:
            return position
    return len(block_ids)


def _spread(values: Sequence[int]) -> Spread:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return Spread(mean=float(np.mean(values)), p50=float(p50), p90=float(p90), p99=float(p99), max=float(max(values)))

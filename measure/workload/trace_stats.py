"""Statistics of a trace, and the cache hits of two reference placements, which replays are checked against."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from measure.workload.session_traces import RecordedSession
from measure.workload.sessions import Session
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
    """Cache hits of a placement with caches of limited size."""

    block_hit: float
    """Share of all blocks."""
    hot_spot: float
    """Number of workers times the largest share of missed blocks on one of them; 1 is even."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """Statistics of a trace. Block counts include partial last blocks."""

    num_requests: int
    duration_s: float
    max_burst: int
    """Most arrivals within one second."""
    prompt_tokens: Spread
    output_tokens: Spread
    num_blocks: int
    num_unique_blocks: int
    infinite_cache_hit: float
    """Share of blocks that are part of a prefix seen before."""
    share_beyond_first: float
    """Share of requests that find more than one block; the first is often a common system prompt."""


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
        max_burst=int(np.bincount([int(request.arrival_s) for request in trace.requests]).max()),
        prompt_tokens=_spread_of([request.num_prompt_tokens for request in trace.requests]),
        output_tokens=_spread_of([request.num_output_tokens for request in trace.requests]),
        num_blocks=num_blocks,
        num_unique_blocks=len(seen),
        infinite_cache_hit=num_hits / num_blocks,
        share_beyond_first=num_beyond / num_requests,
    )


def round_robin_hits(trace: Trace, *, num_workers: int, blocks_per_worker: int) -> PlacementHits:
    """Return the hits when requests go to the workers in turn."""
    return _place(trace, [LruBlocks(blocks_per_worker) for _ in range(num_workers)], lambda index, _found, _miss: index)


def sticky_hits(trace: Trace, *, num_workers: int, blocks_per_worker: int) -> PlacementHits:
    """Return the hits when each request goes to the worker with most of its prefix.

    A match of one block counts as none, see `TraceStats.share_beyond_first`; a request without a match goes to the
    worker that has computed least.
    """

    def choose(_index: int, found: Sequence[int], missed: Sequence[int]) -> int:
        workers = range(len(found))
        best = max(workers, key=lambda worker: (found[worker], -missed[worker]))
        return best if found[best] > 1 else min(workers, key=lambda worker: missed[worker])

    return _place(trace, [LruBlocks(blocks_per_worker) for _ in range(num_workers)], choose)


class LruBlocks:
    """An LRU cache of block ids, which evicts the last blocks of a prompt first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def leading(self, block_ids: Sequence[int]) -> int:
        """Return the number of leading blocks in the cache."""
        return _leading(block_ids, self._blocks)

    def use(self, block_ids: Sequence[int]) -> None:
        """Add the blocks of a prompt as most recently used; of a prompt beyond the capacity, the leading ones."""
        for block_id in reversed(block_ids[: self._capacity]):
            self._blocks[block_id] = None
            self._blocks.move_to_end(block_id)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def _place(
    trace: Trace, caches: list[LruBlocks], choose: Callable[[int, Sequence[int], Sequence[int]], int]
) -> PlacementHits:
    """Run a placement. `choose` gets the request's number, and by worker the blocks found and those missed so far."""
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


def _spread_of(values: Sequence[float]) -> Spread:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return Spread(mean=float(np.mean(values)), p50=float(p50), p90=float(p90), p99=float(p99), max=float(max(values)))


def stats_table(stats: TraceStats) -> Table:
    """Return a trace's statistics, one per line."""
    rate = f"{stats.num_requests / stats.duration_s:.2f} requests/s" if stats.duration_s else "all at once"
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("requests", f"{stats.num_requests:,}"),
        ("duration", f"{stats.duration_s:,.1f} s"),
        ("rate", f"{rate}, at most {stats.max_burst} in one second"),
        ("prompt tokens", _in_words(stats.prompt_tokens)),
        ("output tokens", _in_words(stats.output_tokens)),
        ("blocks", f"{stats.num_blocks:,}, {stats.num_unique_blocks:,} different"),
        ("infinite-cache hit", f"{stats.infinite_cache_hit:.2%} of all blocks"),
        ("more than one block hit", f"{stats.share_beyond_first:.1%} of the requests"),
    ):
        table.add_row(name, value)
    return table


def session_stats_table(sessions: Sequence[RecordedSession]) -> Table:
    """Return the statistics of recorded sessions, at least one, one per line."""
    plain = [Session(index=0, kind="", start_s=0.0, turns=session.turns) for session in sessions]
    prompts = [length for session in plain for length in session.prompt_lengths()]
    turns = [turn for session in plain for turn in session.turns]
    kept = sum(turn.beginning.num_tokens for turn in turns if turn.beginning is not None)
    pauses = [turn.think_s for turn in turns if turn.after]
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("sessions", f"{len(sessions):,}, {sum(each.num_agents > 1 for each in sessions):,} of them with sub-agents"),
        ("requests", f"{len(turns):,}; of a session {_in_words(_spread_of([len(each.turns) for each in plain]))}"),
        ("prompt tokens", _in_words(_spread_of(prompts))),
        ("output tokens", _in_words(_spread_of([turn.num_output_tokens for turn in turns]))),
        ("new tokens of a turn", _in_words(_spread_of([turn.num_own_tokens for turn in turns]))),
        ("infinite-cache hit", f"{kept / sum(prompts):.2%} of all prompt tokens, within sessions"),
        ("pauses", f"{_in_words(_spread_of(pauses))} s" if pauses else "none"),
    ):
        table.add_row(name, value)
    return table


def placement_line(name: str, hits: PlacementHits) -> tuple[str, str]:
    """Return a placement's name and its hits."""
    return name, f"{hits.block_hit:.2%} of all blocks, hot spot {hits.hot_spot:.2f}"


def _in_words(spread: Spread) -> str:
    return (
        f"mean {spread.mean:,.0f}, p50 {spread.p50:,.0f}, p90 {spread.p90:,.0f},"
        f" p99 {spread.p99:,.0f}, max {spread.max:,.0f}"
    )

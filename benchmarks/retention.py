"""What it brings to know when sessions come back: hit rates of one pooled cache on a trace, offline.

    python -m benchmarks.retention --trace sessions.jsonl.gz [--tokens 1 2 4 8] [--seed 0] [--json results.json]

Method: the sessions of the trace begin at random times, so that about 100 run at a time; a trace in Mooncake's format
is replayed as it is. A request finds the longest cached prefix of its prompt, holds its pages until its answer ends,
and then leaves them in the cache, which is the workers' own (`engine/pages/block_pool.py`) with pages of 512 tokens.
One that finds no room leaves nothing behind. Hit rate: tokens found over tokens asked for.

`lru`; `kvrelay`: the workers' order without knowledge of sessions; `by finish reason`, `by pace`: also what a router
tells them (`router/record/sessions.py`), without the paces of sessions and with them. It learns while it serves, from
nothing, and sees no request before its time. `clairvoyant`: the page goes whose next use is last (Belady 1966), no
policy but a bound. `told`: as `by pace`, for a router that is told when each turn returns, up to a factor of 4, 2 or 1
(one standard deviation): what better forecasts would bring.
"""

import bisect
import gzip
import heapq
import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from common.block_hash import BlockHashes
from common.eviction import num_admitted
from common.ids import BlockHash, BlockId
from common.return_curve import ReturnCurve
from engine.pages.block_pool import KEEP_ALL, BlockPool, Keeping
from measure.workload.traces import read_trace
from router.record.returns import ReturnTimes, TurnKind
from router.record.sessions import Sessions

PAGE_TOKENS = 512
AT_A_TIME = 100
_IDS_PER_PAGE = PAGE_TOKENS // 64


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request of the replay."""

    begin_s: float
    end_s: float
    hashes: BlockHashes
    calls_tool: bool = False
    gap_s: float = math.inf
    """Time from its end to the request that continues it."""
    uses_s: list[float] = field(default_factory=list)
    """Next use of each page."""


class Now:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now_s


def read_sessions(path: Path, rng: random.Random) -> list[Turn]:
    """Return the requests of packed sessions, which begin at random times."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        sessions = [json.loads(line)["requests"] for line in lines]
    span_s = sum(requests[-1]["t"] for requests in sessions) / AT_A_TIME
    turns: list[Turn] = []
    for number, requests in enumerate(sessions):
        begin_s = rng.random() * span_s
        prompts: list[list[int]] = []
        made: list[Turn] = []
        for each in requests:
            j, k = each.get("like", (0, 0))
            ids = prompts[j][:k] if k else []
            for first, count in each.get("new", ()):
                ids.extend(range(first, first + count))
            prompts.append(ids)
            at_s = begin_s + each["t"]
            turn = Turn(
                begin_s=at_s,
                end_s=at_s + (each["api_s"] or 0.0),
                hashes=_hashes(number, ids[_IDS_PER_PAGE - 1 :: _IDS_PER_PAGE]),
                calls_tool=each["stop"] == "tool_use",
            )
            if k and made[j].gap_s == math.inf:
                made[j].gap_s = max(0.0, at_s - made[j].end_s)
            made.append(turn)
        turns += made
    return turns


def _hashes(session: int, ids: Sequence[int]) -> BlockHashes:
    return BlockHashes(b"".join(struct.pack("<QQ", each, session) for each in ids))


def read_turns(path: Path, seed: int) -> list[Turn]:
    """Return the requests of a trace in order."""
    if path.name.endswith(".gz"):
        turns = read_sessions(path, random.Random(seed))
    else:
        requests = read_trace(path).requests
        turns = [
            Turn(begin_s=each.arrival_s, end_s=each.arrival_s, hashes=_hashes(0, each.block_ids)) for each in requests
        ]
    turns = sorted((turn for turn in turns if turn.hashes), key=lambda turn: turn.begin_s)
    latest: dict[BlockHash, float] = {}
    for turn in reversed(turns):
        digests = turn.hashes.digests()
        turn.uses_s = [latest.get(each, math.inf) for each in digests]
        latest |= dict.fromkeys(digests, turn.begin_s)
    return turns


class Router:
    """What a router tells the cache. Without pace it goes by the finish reason alone."""

    def __init__(self, clock: Now, *, with_pace: bool = True) -> None:
        self._sessions, self._with_pace = Sessions(clock), with_pace
        self._running: dict[int, Any] = {}

    def begin(self, number: int, turn: Turn) -> None:
        """Note a request."""
        self._running[number] = session = self._sessions.begin("", turn.hashes)
        if not self._with_pace:
            session.mean_log_s = None

    def end(self, number: int, turn: Turn) -> ReturnCurve | None:
        """Return what is expected of a turn that has ended."""
        return self._sessions.end("", self._running.pop(number), turn.hashes, calls_tool=turn.calls_tool)


class Told:
    """A router that is told how long each session stays away, up to a factor."""

    def __init__(self, clock: Now, octaves: float) -> None:
        self._clock, self._octaves, self._rng = clock, octaves, random.Random(0)
        self._times = ReturnTimes()
        self._open: list[tuple[float, int, TurnKind, Turn]] = []

    def begin(self, number: int, turn: Turn) -> None:
        """Learn of the returns until now."""
        while self._open and self._open[0][0] <= turn.begin_s:
            _, _, kind, before = heapq.heappop(self._open)
            has_returned = before.gap_s < math.inf
            self._times.note(kind, min(before.gap_s, 14400.0), len(before.hashes), has_returned=has_returned)

    def end(self, number: int, turn: Turn) -> ReturnCurve | None:
        """Return what is expected of a turn that has ended."""
        log_s = math.log2(max(1.0, min(turn.gap_s, 65536.0))) + self._rng.gauss(0.0, self._octaves)
        kind = TurnKind(calls_tool=True, pace=max(0, round(log_s)))
        heapq.heappush(self._open, (turn.end_s + min(turn.gap_s, 14400.0), number, kind, turn))
        return self._times.curve(kind)


def hit_rate(
    turns: Sequence[Turn], num_pages: int, make: Callable[[Now], Router | Told] | None, *, is_lru: bool = False
) -> float:
    """Return the share of tokens that a pool of pages holds when they are asked for."""
    clock = Now()
    pool, router = BlockPool(num_pages, clock=clock), make(clock) if make is not None else None
    num_hits = num_asked = 0
    held: dict[int, tuple[list[BlockId], int]] = {}
    for at_s, number, is_end in _changes(turns):
        turn, clock.now_s = turns[number], at_s
        if is_end:
            if (found := held.pop(number, None)) is not None:
                table, num_cached = found
                pool.release(table, KEEP_ALL if is_lru else Keeping(num_front=num_cached + num_admitted(num_pages)))
            if router is not None and (curve := router.end(number, turn)) is not None:
                pool.expect_return([turn.hashes[-1]], curve)
            continue
        if router is not None:
            router.begin(number, turn)
        hashes = turn.hashes.digests()
        cached = pool.match_prefix(hashes)
        num_hits, num_asked = num_hits + len(cached), num_asked + len(hashes)
        if len(hashes) - len(cached) > pool.num_free - pool.num_matched_free(cached):
            continue
        pool.acquire(cached)
        if not is_lru:
            pool.mark_reused(cached, len(cached))
        table = [*cached, *pool.allocate(len(hashes) - len(cached))]
        for i in range(len(cached), len(table)):
            published = pool.publish(table[i], hashes[i], behind=table[i - 1] if i else None)
            if published != table[i]:
                pool.acquire([published])
                pool.release([table[i]])
                table[i] = published
        held[number] = table, len(cached)
        pool.drain_events()
    return num_hits / num_asked


def _changes(turns: Sequence[Turn]) -> Iterator[tuple[float, int, bool]]:
    """Yield begins and ends, by time; the end of a turn comes before what begins with it."""
    changes = [(turn.end_s, False, number) for number, turn in enumerate(turns) if turn.end_s > turn.begin_s]
    changes += [(turn.begin_s, True, number) for number, turn in enumerate(turns)]
    for at_s, is_begin, number in sorted(changes):
        yield at_s, number, not is_begin
        if is_begin and turns[number].end_s <= at_s:
            yield at_s, number, True


def best_hit_rate(turns: Sequence[Turn], num_pages: int) -> float:
    """Return the same for a cache that knows the next use of each page; what a running turn holds stays."""
    next_s: dict[BlockHash, float] = {}
    holders: dict[BlockHash, int] = {}
    heap: list[tuple[float, int, BlockHash]] = []
    num_hits = num_asked = 0
    runs: set[int] = set()
    for _at_s, number, is_end in _changes(turns):
        hashes = turns[number].hashes.digests()
        if is_end:
            if number in runs:
                for i, each in enumerate(hashes):
                    holders[each] -= 1
                    if not holders[each]:
                        del holders[each]
                        heapq.heappush(heap, (-next_s[each], -i, each))
            continue
        num_asked += len(hashes)
        num_found = bisect.bisect_left(hashes, 1, key=lambda each: each not in next_s)
        num_hits += num_found
        if sum(each not in holders for each in hashes) + len(holders) > num_pages:
            for each, at_s in zip(hashes[:num_found], turns[number].uses_s, strict=False):
                next_s[each] = at_s
                if each not in holders:
                    heapq.heappush(heap, (-at_s, 0, each))
            continue
        runs.add(number)
        for each, at_s in zip(hashes, turns[number].uses_s, strict=True):
            next_s[each] = at_s
            holders[each] = holders.get(each, 0) + 1
        while len(next_s) > num_pages:
            at_s, _, each = heapq.heappop(heap)
            if next_s.get(each) == -at_s and each not in holders:
                del next_s[each]
    return num_hits / num_asked


def _told_hit_rate(turns: Sequence[Turn], octaves: float, num_pages: int) -> float:
    return hit_rate(turns, num_pages, lambda clock: Told(clock, octaves))


def main() -> None:
    """Print the table."""
    parser = command_line("retention", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="packed sessions (.gz), or Mooncake's format")
    parser.add_argument("--tokens", type=float, nargs="+", default=[1, 2, 4, 8], help="sizes of the cache, millions")
    parser.add_argument("--seed", type=int, default=0, help="of the times at which sessions begin")
    args = parser.parse_args()
    turns = read_turns(args.trace, args.seed)
    arms: dict[str, Callable[[int], float]] = {
        "lru": lambda pages: hit_rate(turns, pages, None, is_lru=True),
        "kvrelay": lambda pages: hit_rate(turns, pages, None),
        "by finish reason": lambda pages: hit_rate(turns, pages, lambda clock: Router(clock, with_pace=False)),
        "by pace": lambda pages: hit_rate(turns, pages, Router),
        "clairvoyant": lambda pages: best_hit_rate(turns, pages),
    }
    if args.trace.name.endswith(".gz"):
        for octaves in (2.0, 1.0, 0.0):
            arms[f"told, × {2**octaves:g}"] = partial(_told_hit_rate, turns, octaves)
    figures = Figures()
    for name, rate in arms.items():
        for millions in args.tokens:
            pages = round(millions * 1e6 / PAGE_TOKENS)
            figures.add("hit rate, %", args.trace.name, name, **{f"{millions:g} M": 100 * rate(pages)})
    figures.show(terminal())
    write_figures(args.json, figures, method="benchmarks/retention.py", seed=args.seed)


if __name__ == "__main__":
    main()

"""Which blocks to evict: hit rates of eviction policies on a trace, offline.

    python -m benchmarks.eviction --trace mooncake_conversation.jsonl [--json results.json]

Method: every request of the trace, in order, goes to the worker that holds its longest prefix, or to the next one in
turn when no worker holds more than its first block (which nearly all prompts share). A worker is a cache of blocks;
nothing takes time, and nothing is held. A block is a hit when it and all blocks before it are cached. Hit rate: hits
over all blocks. Blocks enter a cache tail first, so that a child is always evicted before its parent.

`lru`; `slru`, with a protected segment of a share of the cache (Karedla, Love, Wherry 1994); `lru, used once first`, as
LRU-2 does (O'Neil, O'Neil, Weikum 1993); `kvrelay` (`common/eviction.py`, the code that workers run), and the same
without its rule for long prompts; `clairvoyant`: what is not asked for again goes first, then what is asked for last
(Belady 1966), no policy but a bound.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from common.eviction import EvictionClass, EvictionOrder, num_admitted
from measure.workload.traces import read_trace

SIZES = ((4, 1000), (8, 1000), (4, 3000), (8, 3000))
"""Workers, blocks each."""

Prompt = Sequence[int]
NEVER = 1 << 62


class Cache(Protocol):
    """One worker's cache."""

    def __contains__(self, block: int) -> bool: ...

    def use(self, prompt: Prompt, num_hits: int, now: int) -> None:
        """Serve request number `now`, whose first `num_hits` blocks are cached, and keep what is worth it."""
        ...


class Segmented:
    """Blocks that were hit are protected, up to a share of the cache; those that leave it start again as new ones."""

    def __init__(self, capacity: int, protected_share: float) -> None:
        self._capacity = capacity
        self._max_protected = int(protected_share * capacity)
        self._new: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._new or block in self._protected

    def use(self, prompt: Prompt, num_hits: int, now: int) -> None:
        """See `Cache`."""
        for block in reversed(prompt[num_hits:]):
            self._new[block] = None
            self._new.move_to_end(block)
        for block in reversed(prompt[:num_hits]):
            self._new.pop(block, None)
            self._protected[block] = None
            self._protected.move_to_end(block)
        while len(self._protected) > self._max_protected:
            self._new[self._protected.popitem(last=False)[0]] = None
        while len(self._new) + len(self._protected) > self._capacity:
            (self._new or self._protected).popitem(last=False)


class Ours:
    """The workers' policy."""

    def __init__(self, capacity: int, num_kept: int) -> None:
        self._capacity = capacity
        self._num_kept = num_kept
        self._order: EvictionOrder[int] = EvictionOrder()
        self._blocks: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, prompt: Prompt, num_hits: int, now: int) -> None:
        """See `Cache`."""
        for i in reversed(range(len(prompt))):
            block = prompt[i]
            if i < num_hits:
                self._order.remove(block)
                self._order.put(block, EvictionClass.WARM)
            else:
                self._blocks.add(block)
                self._order.put(block, EvictionClass.COLD if i < num_hits + self._num_kept else EvictionClass.TAIL)
        while len(self._order) > self._capacity:
            self._blocks.remove(self._order.evict())


class Clairvoyant:
    """Knows when each block of each request is asked for next."""

    def __init__(self, capacity: int, next_uses: Sequence[Mapping[int, int]]) -> None:
        self._capacity = capacity
        self._next_uses = next_uses
        self._next: dict[int, int] = {}
        self._last: list[tuple[int, int, int]] = []
        """A heap of (-next use, -depth, block): the block that is asked for last first, leaves before their parents.

        Entries that a later use has replaced stay until they are popped.
        """

    def __contains__(self, block: int) -> bool:
        return block in self._next

    def use(self, prompt: Prompt, num_hits: int, now: int) -> None:
        """See `Cache`."""
        coming = self._next_uses[now]
        for i, block in enumerate(prompt):
            self._next[block] = when = coming.get(block, NEVER)
            heapq.heappush(self._last, (-when, -i, block))
        while len(self._next) > self._capacity:
            when, _depth, block = heapq.heappop(self._last)
            if self._next.get(block) == -when:
                del self._next[block]


def next_uses(prompts: Sequence[Prompt]) -> list[dict[int, int]]:
    """Return, for each request, the number of the next request that has a block of it, by block."""
    latest: dict[int, int] = {}
    uses: list[dict[int, int]] = []
    for now in reversed(range(len(prompts))):
        uses.append({block: latest[block] for block in prompts[now] if block in latest})
        latest.update(dict.fromkeys(prompts[now], now))
    return uses[::-1]


def hit_rate(prompts: Sequence[Prompt], workers: Sequence[Cache]) -> float:
    """Return the share of blocks that are hits."""
    num_hits = num_turns = 0
    for now, prompt in enumerate(prompts):
        held = [sum(1 for _ in _leading(prompt, worker)) for worker in workers]
        best = max(held)
        if best > 1:
            chosen = held.index(best)
        else:
            chosen = num_turns % len(workers)
            num_turns += 1
        num_hits += held[chosen]
        workers[chosen].use(prompt, held[chosen], now)
    return num_hits / sum(map(len, prompts))


def _leading(prompt: Prompt, worker: Cache) -> Iterator[int]:
    for block in prompt:
        if block not in worker:
            return
        yield block


def policies(prompts: Sequence[Prompt]) -> dict[str, Callable[[int], Cache]]:
    """Return makers of caches of so many blocks, by name."""
    uses = next_uses(prompts)
    return {
        "lru": lambda capacity: Segmented(capacity, 0.0),
        "slru, 20 % protected": lambda capacity: Segmented(capacity, 0.2),
        "slru, 80 % protected": lambda capacity: Segmented(capacity, 0.8),
        "lru, used once first": lambda capacity: Segmented(capacity, 1.0),
        "kvrelay": lambda capacity: Ours(capacity, num_admitted(capacity)),
        "kvrelay, all admitted": lambda capacity: Ours(capacity, capacity),
        "clairvoyant": lambda capacity: Clairvoyant(capacity, uses),
    }


def main() -> None:
    """Print the table."""
    parser = command_line("eviction", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="a trace in Mooncake's format")
    args = parser.parse_args()
    prompts = [request.block_ids for request in read_trace(args.trace).requests]
    figures = Figures()
    for name, make in policies(prompts).items():
        for workers, blocks in SIZES:
            rate = hit_rate(prompts, [make(blocks) for _ in range(workers)])
            figures.add("hit rate, %", args.trace.name, name, **{f"{workers}_×_{blocks}": 100 * rate})
    figures.show(terminal())
    write_figures(args.json, figures, method="benchmarks/eviction.py")


if __name__ == "__main__":
    main()

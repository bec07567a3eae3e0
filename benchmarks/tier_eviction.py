"""Which blocks a full tier should give up: the least recently used, or those that save the fewest seconds per byte.

    python -m benchmarks.tier_eviction [--sessions sessions.jsonl.gz] [--trace mooncake.jsonl] [--json FILE]

Method: the prompts of a trace, in order of their times, ask one cache of blocks; nothing takes time. Sessions begin
evenly over `--span` seconds and go on at their own times (`benchmarks/tiers.py`). A block is a hit when it and all
before it are cached. A hit saves the seconds in which the block would be computed at its depth, on a roofline
(`measure/simulate/roofline.py`): blocks have the same size, and later ones attend to more. Hit rate: hits over all
blocks; seconds: those that hits save over those of all blocks.

All policies give up leaves only, since a block without its parent is never read:

- `lru`: the least recently used one, as `kv_tiers/` does.
- `seconds × uses` (GDSF: Cherkasova 1998): uses so far times seconds, aged by the value of the last one that went.
- `seconds ÷ age`: the chance to return falls with the time since the last use; the least of 32 random leaves goes.
- `seconds × uses ÷ age`: both.
- `clairvoyant`: what is asked for last goes first (Belady 1966), no policy but a bound on hits.
"""

import heapq
import math
import random
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.eviction import Cache, Clairvoyant, Prompt, Segmented, next_uses
from benchmarks.figures import Figures
from benchmarks.tiers import Load
from measure.simulate.roofline import Hardware
from measure.workload.traces import MOONCAKE_BLOCK_SIZE, read_trace

PAGE = 1024
"""Tokens of a block of sessions."""
SIZES = (1, 2, 4, 8)
"""Sizes of the cache, in millions of tokens."""
_NUM_SAMPLED = 32


class Leaves(ABC):
    """Blocks with their parents; those without children may go."""

    def __init__(self, capacity: int, block_s: Callable[[int], float]) -> None:
        """`block_s` returns the seconds that a block of some depth takes to compute."""
        self._capacity = capacity
        self._block_s = block_s
        self.seconds: dict[int, float] = {}
        """Seconds that each held block took to compute."""
        self.uses: Counter[int] = Counter()
        self._parents: dict[int, int | None] = {}
        self.num_children: Counter[int] = Counter()

    def __contains__(self, block: int) -> bool:
        return block in self.seconds

    def use(self, prompt: Prompt, num_hits: int, now: int) -> None:
        """See `Cache`."""
        for i, block in enumerate(prompt):
            self.uses[block] += 1
            if block not in self.seconds:
                self.seconds[block] = self._block_s(i)
                self._parents[block] = parent = prompt[i - 1] if i else None
                if parent is not None:
                    self.num_children[parent] += 1
            self.touch(block, now)
        while len(self.seconds) > self._capacity:
            self._drop(self.worst(now), now)

    def _drop(self, block: int, now: int) -> None:
        for each in (self.seconds, self.uses, self.num_children):
            each.pop(block, None)
        parent = self._parents.pop(block)
        if parent is not None:
            self.num_children[parent] -= 1
            if not self.num_children[parent]:
                self.free(parent)

    @abstractmethod
    def touch(self, block: int, now: int) -> None:
        """Note that a block is used now."""

    @abstractmethod
    def free(self, block: int) -> None:
        """Note that a block is a leaf again."""

    @abstractmethod
    def worst(self, now: int) -> int:
        """Return the leaf that goes, and forget it."""


class Valued(Leaves):
    """Each block has a value; the leaf of the least value goes."""

    def __init__(self, capacity: int, block_s: Callable[[int], float]) -> None:
        super().__init__(capacity, block_s)
        self._values: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._floor = 0.0

    def touch(self, block: int, now: int) -> None:
        """See `Leaves`."""
        self._values[block] = self._floor + self.uses[block] * self.seconds[block]
        self.free(block)

    def free(self, block: int) -> None:
        """See `Leaves`."""
        heapq.heappush(self._heap, (self._values[block], block))

    def worst(self, now: int) -> int:
        """See `Leaves`."""
        while True:
            value, block = heapq.heappop(self._heap)
            if self._values.get(block) == value and not self.num_children[block]:
                self._floor = value
                del self._values[block]
                return block


class Sampled(Leaves):
    """Evicts, of some random leaves, the one with the fewest seconds of computing for its age."""

    def __init__(self, capacity: int, block_s: Callable[[int], float], *, by_uses: bool) -> None:
        super().__init__(capacity, block_s)
        self._by_uses = by_uses
        self._used: dict[int, int] = {}
        self._leaves: list[int] = []
        """Blocks that may be leaves, some of them twice."""
        self._random = random.Random(0)

    def touch(self, block: int, now: int) -> None:
        """See `Leaves`."""
        if block not in self._used:
            self._leaves.append(block)
        self._used[block] = now

    def free(self, block: int) -> None:
        """See `Leaves`."""
        self._leaves.append(block)

    def worst(self, now: int) -> int:
        """See `Leaves`."""
        found: dict[int, float] = {}
        num_tried = 0
        while not found or num_tried < _NUM_SAMPLED:
            at = self._random.randrange(len(self._leaves))
            block = self._leaves[at]
            if block not in self._used or self.num_children[block]:
                self._leaves[at] = self._leaves[-1]
                self._leaves.pop()
                continue
            num_tried += 1
            uses = self.uses[block] if self._by_uses else 1
            found[block] = uses * self.seconds[block] / (now - self._used[block] + 1)
        block = min(found, key=lambda each: (found[each], -self.seconds[each]))
        del self._used[block]
        return block


def evaluate(prompts: Sequence[Prompt], cache: Cache, block_s: Callable[[int], float]) -> tuple[float, float]:
    """Return the share of blocks that are hits, and of the seconds that they save."""
    num_hits, saved_s, all_s = 0, 0.0, 0.0
    sums = [0.0]
    for now, prompt in enumerate(prompts):
        while len(sums) <= len(prompt):
            sums.append(sums[-1] + block_s(len(sums) - 1))
        held = next((i for i, block in enumerate(prompt) if block not in cache), len(prompt))
        num_hits, saved_s, all_s = num_hits + held, saved_s + sums[held], all_s + sums[len(prompt)]
        cache.use(prompt, held, now)
    return num_hits / sum(map(len, prompts)), saved_s / all_s


def policies(prompts: Sequence[Prompt], block_s: Callable[[int], float]) -> dict[str, Callable[[int], Cache]]:
    """Return makers of caches of so many blocks, by name."""
    uses = next_uses(prompts)
    return {
        "lru": lambda capacity: Segmented(capacity, 0.0),
        "seconds × uses": lambda capacity: Valued(capacity, block_s),
        "seconds ÷ age": lambda capacity: Sampled(capacity, block_s, by_uses=False),
        "seconds × uses ÷ age": lambda capacity: Sampled(capacity, block_s, by_uses=True),
        "clairvoyant": lambda capacity: Clairvoyant(capacity, uses),
    }


def workloads(options: Namespace) -> Iterator[tuple[str, int, Sequence[Prompt]]]:
    """Yield name, tokens of a block, and prompts."""
    if (path := options.sessions) is not None:
        sessions = Load(
            trace=path, num_sessions=sys.maxsize, longest=sys.maxsize, span_s=options.span, until_s=math.inf
        )
        yield path.name, PAGE, sessions.pages(PAGE)
    if (path := options.trace) is not None:
        yield path.name, MOONCAKE_BLOCK_SIZE, [request.block_ids for request in read_trace(path).requests]


def main() -> None:
    """Print the table."""
    parser = command_line("tier_eviction", __doc__)
    parser.add_argument("--sessions", type=Path, help="sessions, as JSON lines compressed with gzip")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--span", type=float, default=21_000.0, help="seconds in which sessions begin (default 21000)")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--device", default="h200-tp4")
    options = parser.parse_args()
    speed = Hardware(model=options.model, device=options.device, timing_file=None).pace(8192)[0]
    assert speed.timing is not None, "a roofline has weights"
    prefill, figures = speed.timing.prefill, Figures()
    for name, page, prompts in workloads(options):

        def block_s(depth: int, page: int = page) -> float:
            return page * (prefill.per_prefill_token_s + prefill.per_prefill_pair_s * page * (depth + 0.5))

        for policy, make in policies(prompts, block_s).items():
            for millions in SIZES:
                hits, seconds = evaluate(prompts, make(int(millions * 1e6) // page), block_s)
                size = f"{millions:g}M"
                figures.add("hits, %", name, policy, **{size: 100 * hits})
                figures.add("seconds, %", name, policy, **{size: 100 * seconds})
            figures.show(terminal(stderr=True))
    figures.show(terminal())
    write_figures(options.json, figures, method="benchmarks/tier_eviction.py")


if __name__ == "__main__":
    main()

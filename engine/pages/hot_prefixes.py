"""The most valuable prefixes of a cache, which other workers take over when this one leaves.

The order is that of eviction (`common/eviction.py`), reversed: the page that would be evicted last comes first. Pages
that running requests share come before all others. A page that only one running request holds is left out: it moves
with that request.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Protocol, TypeVar

from common.block_hash import BlockHashes
from common.eviction import MAX_VALUE
from common.ids import BlockHash
from common.prefix_chains import PrefixChain

K = TypeVar("K", bound=Hashable)


class RankedBlocks(Protocol[K]):
    """Cached blocks of one engine, under its keys for them."""

    def hottest(self) -> Iterator[tuple[float, K]]:
        """Yield values and blocks that are not in use, the most valuable first."""
        ...

    def parent_of(self, block: K) -> K | None:
        """Return the block before one; None for the first block of a prompt."""
        ...

    def hash_of(self, block: K) -> BlockHash:
        """Return our name of a block."""
        ...

    def is_reused(self, block: K) -> bool:
        """Whether a request has found it."""
        ...


@dataclass(slots=True)
class _Growing(Generic[K]):
    """A chain under construction."""

    trunk: int | None
    num_shared: int
    pages: list[K] = field(default_factory=list)


def hot_prefixes(pool: RankedBlocks[K], held: Iterable[K], max_blocks: int) -> list[PrefixChain]:
    """Return the `max_blocks` most valuable blocks, as chains from their roots, the most valuable first.

    `held` are the last reused blocks of requests that run. O(max_blocks + held blocks), and a look at the pages
    of which it is known when they may be asked for again.
    """
    values: dict[K, float] = {}  # most valuable first, parents before children
    for value, block_id in chain(((MAX_VALUE, block) for block in held), pool.hottest()):
        path: list[K] = []
        page: K | None = block_id
        while page is not None and page not in values:
            path.append(page)
            page = pool.parent_of(page)
        # A parent that was not yielded itself is held, or equally old: it is worth at least as much.
        for page in reversed(path):
            if len(values) == max_blocks:
                return _chains(pool, values)
            values[page] = value
    return _chains(pool, values)


def _chains(pool: RankedBlocks[K], values: dict[K, float]) -> list[PrefixChain]:
    chains: list[_Growing[K]] = []
    places: dict[K, tuple[int, int]] = {}  # of a page: chain, and blocks from the root to the page, itself included
    for page in values:
        parent = pool.parent_of(page)
        trunk, depth = (None, 0) if parent is None else places[parent]
        if trunk is not None and chains[trunk].pages[-1] == parent:
            chain_idx = trunk
        else:
            chain_idx = len(chains)
            chains.append(_Growing(trunk, depth))
        chains[chain_idx].pages.append(page)
        places[page] = chain_idx, depth + 1
    return [
        PrefixChain(
            hashes=BlockHashes.of(map(pool.hash_of, each.pages)),
            values=tuple(values[page] for page in each.pages),
            num_reused=sum(map(pool.is_reused, each.pages)),
            trunk=each.trunk,
            num_shared=each.num_shared,
        )
        for each in chains
    ]

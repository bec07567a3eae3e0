"""The most valuable prefixes of a cache, which other workers take over when this one leaves.

The order is that of eviction (`common/eviction.py`), reversed: the page that would be evicted last comes first. Pages
that running requests share come before all others. A page that only one running request holds is left out: it moves
with that request.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from common.block_hash import BlockHashes
from common.eviction import MAX_VALUE
from common.prefix_chains import PrefixChain
from engine.block_pool import BlockPool


@dataclass(slots=True)
class _Growing:
    """A chain under construction."""

    trunk: int | None
    num_shared: int
    pages: list[int] = field(default_factory=list)


def hot_prefixes(pool: BlockPool, held: Iterable[Sequence[int]], max_blocks: int) -> list[PrefixChain]:
    """Return the `max_blocks` most valuable blocks, as chains from their roots, the most valuable first.

    `held` are the block tables in use. O(max_blocks + tables · log pages), for any cache size. Engine thread only.
    """
    values: dict[int, float] = {}  # most valuable first, parents before children
    for value, block_id in _candidates(pool, held):
        path: list[int] = []
        page: int | None = block_id
        while page is not None and page not in values:
            path.append(page)
            page = pool.parent_of(page)
        # A parent that was not yielded itself is held, or equally old: it is worth at least as much.
        for page in reversed(path):
            if len(values) == max_blocks:
                return _chains(pool, values)
            values[page] = value
    return _chains(pool, values)


def _candidates(pool: BlockPool, held: Iterable[Sequence[int]]) -> Iterator[tuple[float, int]]:
    for block_table in held:
        if num_reused := pool.num_reused(block_table):
            yield MAX_VALUE, block_table[num_reused - 1]
    yield from pool.hottest()


def _chains(pool: BlockPool, values: dict[int, float]) -> list[PrefixChain]:
    chains: list[_Growing] = []
    places: dict[int, tuple[int, int]] = {}  # of a page: chain, and blocks from the root to the page, itself included
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
            hashes=BlockHashes.of(map(pool.hash_of, chain.pages)),
            values=tuple(values[page] for page in chain.pages),
            num_reused=sum(map(pool.is_reused, chain.pages)),
            trunk=chain.trunk,
            num_shared=chain.num_shared,
        )
        for chain in chains
    ]

"""Cached prefixes as a list of chains: a forest, in which every block is named once, with what it is worth.

    0  A ── B ── C ── D          blocks A B C D, from a root
    1       └── E ── F           trunk 0, num_shared 2, blocks E F
    2            └── G           trunk 1, num_shared 3, block G

Chains come in the order of what their first blocks are worth. Along a chain, its trunk included, values never rise, and
what was reused comes before what was not: nothing can be kept without all that is before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.block_hash import BlockHashes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChain:
    """Consecutive blocks of one prompt; where it has no trunk, from the prompt's first block on."""

    hashes: BlockHashes
    values: tuple[float, ...]
    """What each block is worth (`common.eviction.EvictionOrder.least_value`)."""
    num_reused: int
    """How many of the blocks, from the first one on, were used again since they were cached."""
    trunk: int | None = None
    """Position in the list of the earlier chain that this one branches off."""
    num_shared: int = 0
    """Leading blocks in common with the trunk: more than the trunk has in common with its own."""

    @property
    def num_all(self) -> int:
        """Blocks from the root to the end."""
        return self.num_shared + len(self.hashes)


def whole_chain(chains: Sequence[PrefixChain], idx: int) -> PrefixChain:
    """Return a chain of a list with all that is before it, down to the root."""
    chain = chains[idx]
    hashes, values, num_reused = [chain.hashes], [chain.values], chain.num_reused
    while chain.trunk is not None:
        trunk = chains[chain.trunk]
        num_own = chain.num_shared - trunk.num_shared
        hashes.append(trunk.hashes[:num_own])
        values.append(trunk.values[:num_own])
        num_reused = num_own + num_reused if num_reused else min(trunk.num_reused, num_own)
        chain = trunk
    return PrefixChain(
        hashes=BlockHashes(b"".join(part.packed for part in reversed(hashes))),
        values=tuple(value for part in reversed(values) for value in part),
        num_reused=num_reused,
    )


class ChainSelection:
    """Some chains of a list, as a list of their own. A chain whose trunk was not chosen comes with what it needs."""

    def __init__(self, chains: Sequence[PrefixChain]) -> None:
        self._chains = chains
        self._places: dict[int, int] = {}
        self.chosen: list[PrefixChain] = []

    def num_blocks_of(self, idx: int) -> int:
        """Return how many blocks more will have been chosen with this chain."""
        chain = self._chains[idx]
        return len(chain.hashes) if chain.trunk is None or chain.trunk in self._places else chain.num_all

    def has_trunk_of(self, idx: int) -> bool:
        """Whether the chain that this one branches off was chosen."""
        return self._chains[idx].trunk in self._places

    def add(self, idx: int) -> None:
        """Choose a chain that was not chosen before."""
        chain = self._chains[idx]
        if chain.trunk is None or chain.trunk in self._places:
            trunk = None if chain.trunk is None else self._places[chain.trunk]
            # A trunk that came whole has other blocks of its own than in the list that was chosen from, but as many
            # from the root.
            chosen = replace(chain, trunk=trunk)
        else:
            chosen = whole_chain(self._chains, idx)
        self._places[idx] = len(self.chosen)
        self.chosen.append(chosen)

"""Cached prefixes as a list of chains: a forest that names every block once, with its value.

    0  A ── B ── C ── D          blocks A B C D, from a root
    1       └── E ── F           trunk 0, num_shared 2, blocks E F
    2            └── G           trunk 1, num_shared 3, block G

Chains are ordered by the values of their first blocks. Along a chain, its trunk included, values never rise, and reused
blocks come before others: a block is useless without all blocks before it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from common.block_hash import HASH_BYTES, BlockHashes
from common.errors import InvalidRequest
from kvrelay.v1 import prefix_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChain:
    """Consecutive blocks of one prompt; without a trunk, from the prompt's first block on."""

    hashes: BlockHashes
    values: tuple[float, ...]
    """Value of each block (`common.eviction.EvictionOrder.least_value`)."""
    num_reused: int
    """Leading blocks that were used again since they were cached."""
    trunk: int | None = None
    """Position in the list of the earlier chain that this one branches off."""
    num_shared: int = 0
    """Leading blocks shared with the trunk: more than the trunk shares with its own."""

    @property
    def num_all(self) -> int:
        """Blocks from the root to the end."""
        return self.num_shared + len(self.hashes)


def whole_chain(chains: Sequence[PrefixChain], idx: int) -> PrefixChain:
    """Return a chain of a list extended by all blocks before it, from the root on."""
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
    """A selection of a list of chains, as a valid list. A chain without its trunk is extended to the root."""

    def __init__(self, chains: Sequence[PrefixChain]) -> None:
        self._chains = chains
        self._places: dict[int, int] = {}
        self.chosen: list[PrefixChain] = []

    def num_blocks_of(self, idx: int) -> int:
        """Return how many blocks this chain would add."""
        chain = self._chains[idx]
        return len(chain.hashes) if chain.trunk is None or chain.trunk in self._places else chain.num_all

    def has_trunk_of(self, idx: int) -> bool:
        """Return whether the trunk of this chain was chosen."""
        return self._chains[idx].trunk in self._places

    def add(self, idx: int) -> None:
        """Choose a chain. Each chain may be chosen once."""
        chain = self._chains[idx]
        if chain.trunk is None or chain.trunk in self._places:
            trunk = None if chain.trunk is None else self._places[chain.trunk]
            # A trunk that was extended to the root has more blocks of its own, but the same number from the root.
            chosen = replace(chain, trunk=trunk)
        else:
            chosen = whole_chain(self._chains, idx)
        self._places[idx] = len(self.chosen)
        self.chosen.append(chosen)


MAX_BLOCKS = 1 << 16
"""Most blocks in one list."""


def chains_to_proto(chains: Iterable[PrefixChain]) -> list[pb.PrefixChain]:
    """Return the messages of a list."""
    return [
        pb.PrefixChain(
            block_hashes=chain.hashes.packed,
            values=chain.values,
            num_reused_blocks=chain.num_reused,
            trunk=0 if chain.trunk is None else chain.trunk + 1,
            num_shared_blocks=chain.num_shared,
        )
        for chain in chains
    ]


def chains_from_proto(messages: Sequence[pb.PrefixChain]) -> list[PrefixChain]:
    """Return the list. Raises InvalidRequest, naming the chain, for invalid ones."""
    chains: list[PrefixChain] = []
    num_blocks = 0
    for idx, message in enumerate(messages):
        chain = _from_proto(message, chains, f"chains[{idx}]")
        chains.append(chain)
        num_blocks += len(chain.hashes)
        if num_blocks > MAX_BLOCKS:
            raise InvalidRequest(f"more than {MAX_BLOCKS} blocks", field="chains")
    return chains


def _from_proto(message: pb.PrefixChain, earlier: Sequence[PrefixChain], field: str) -> PrefixChain:
    num_bytes = len(message.block_hashes)
    if not num_bytes or num_bytes % HASH_BYTES:
        raise InvalidRequest(
            f"{num_bytes} bytes are not hashes of {HASH_BYTES} bytes each", field=f"{field}.block_hashes"
        )
    num_blocks = num_bytes // HASH_BYTES
    if num_blocks > MAX_BLOCKS:
        raise InvalidRequest(f"more than {MAX_BLOCKS} blocks", field="chains")
    bad_values = InvalidRequest(f"must be {num_blocks} finite numbers in non-increasing order", field=f"{field}.values")
    if len(message.values) != num_blocks:  # before they are walked through
        raise bad_values
    values = tuple(message.values)
    if not all(map(math.isfinite, values)) or not all(a >= b for a, b in pairwise(values)):
        raise bad_values
    if message.num_reused_blocks > num_blocks:
        raise InvalidRequest(f"more than {num_blocks}", field=f"{field}.num_reused_blocks")
    trunk = message.trunk - 1 if message.trunk else None
    least, most = 0, 0
    if trunk is not None:
        if trunk >= len(earlier):
            raise InvalidRequest(f"{message.trunk} is not an earlier chain", field=f"{field}.trunk")
        least, most = earlier[trunk].num_shared + 1, earlier[trunk].num_all
    if not least <= message.num_shared_blocks <= most:
        raise InvalidRequest(
            f"{message.num_shared_blocks}; must be {least} to {most}", field=f"{field}.num_shared_blocks"
        )
    return PrefixChain(
        hashes=BlockHashes(message.block_hashes),
        values=values,
        num_reused=message.num_reused_blocks,
        trunk=trunk,
        num_shared=message.num_shared_blocks,
    )

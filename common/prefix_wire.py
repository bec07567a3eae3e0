"""Converts prefix chains to and from the wire."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from common.block_hash import HASH_BYTES, BlockHashes
from common.errors import InvalidRequest
from common.prefix_chains import PrefixChain
from kvrelay.v1 import prefix_pb2 as pb

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

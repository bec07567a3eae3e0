"""Identifiers. Ids that cross a trust boundary are minted here, never taken from a client."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NewType

RequestId = NewType("RequestId", str)
HandoffId = NewType("HandoffId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)
"""One life of a worker process; a restart begins a new epoch."""
BlockHash = NewType("BlockHash", bytes)
"""A chained hash of 16 bytes; see common.block_hash."""
HashRoot = NewType("HashRoot", bytes)
"""The first link of a chain of block hashes, 32 bytes."""
NO_ROOT = HashRoot(b"")
"""In the place of a root that is not known."""
BlockId = NewType("BlockId", int)
"""Index of a page in one worker's pool."""


_source: random.Random = random.SystemRandom()


@contextmanager
def seeded_ids(seed: int) -> Iterator[None]:
    """Mint the same ids in every run of the block. For simulations only: the ids can be guessed. Not thread-safe."""
    global _source
    before, _source = _source, random.Random(seed)
    try:
        yield
    finally:
        _source = before


def mint_request_id() -> RequestId:
    """Return a fresh request id."""
    return RequestId(f"req-{_source.getrandbits(64):016x}")


def mint_handoff_id() -> HandoffId:
    """Return a fresh, unguessable handoff id: holding it is the right to fetch the KV."""
    return HandoffId(f"ho-{_source.getrandbits(128):032x}")


def mint_epoch() -> Epoch:
    """Return a fresh epoch (63 bits, never 0)."""
    return Epoch(_source.getrandbits(63) | 1)

"""Identifiers. Those that cross a trust boundary are minted here, never taken from a client."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
HandoffId = NewType("HandoffId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)
"""Names one life of a worker process; a restarted worker has another one."""
BlockHash = NewType("BlockHash", bytes)
"""16 bytes; chained, see common.block_hash."""
BlockId = NewType("BlockId", int)
"""Index of a page in one worker's pool."""


def mint_request_id() -> RequestId:
    """Return a fresh request id."""
    return RequestId("req-" + secrets.token_hex(8))


def mint_handoff_id() -> HandoffId:
    """Return a fresh, unguessable handoff id: holding it is the right to fetch the KV."""
    return HandoffId("ho-" + secrets.token_hex(16))


def mint_epoch() -> Epoch:
    """Return a fresh epoch (63 bits, never 0)."""
    return Epoch(secrets.randbits(63) | 1)

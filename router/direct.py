"""What lets a client stream its tokens from a decode worker (decode_worker/direct.py)."""

import secrets

from kvrelay.v1 import decode_pb2

CAPABILITY_BYTES = 32
TTL_S = 30.0
"""How long a client may take to come: as long as a connection may take."""
CHECKPOINT_TOKENS = 64
"""At most so many tokens are generated again when the worker is lost."""


def direct_access() -> decode_pb2.DirectAccess:
    """Return the right to stream one answer, which nobody can guess."""
    return decode_pb2.DirectAccess(
        capability=secrets.token_bytes(CAPABILITY_BYTES), ttl_s=TTL_S, checkpoint_tokens=CHECKPOINT_TOKENS
    )

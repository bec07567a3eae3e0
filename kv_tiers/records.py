"""Records of the disk tier's index: one of fixed size for each slot, at its number.

    magic 4 · version 2 · state 2 · number 8 · used 8 · block hash 16 · root tag 16 · seal 28 · key of the store 8
    · zeros 20 · check 16

A record says itself where it belongs and to which store. Its check finds accidents; who makes one up can name a block,
but not seal its bytes. Writing a slot takes three steps, `WRITING` record, bytes, `WHOLE` record, so that a process
that ends in between leaves a block that is known to be torn. Nothing is synced: what a power loss leaves half done, the
seal finds.
"""

import enum
import hashlib
import struct

from common.ids import BlockHash
from kv_tiers.faults import FaultKind
from kv_tiers.slots import Slot

FORMAT_VERSION = 1
RECORD_BYTES = 128
"""Divides a sector."""
EMPTY = bytes(RECORD_BYTES)
KEY_BYTES = 8
_MAGIC = b"kvtr"
_BODY = struct.Struct("<4sHHQQ16s16s28s8s20x")
_MAX_USED = 1 << 62


class State(enum.IntEnum):
    """What a slot's bytes are."""

    WRITING = 1
    WHOLE = 2


def pack(slot: Slot, seal: bytes, state: State, *, key: bytes) -> bytes:
    """Return the record of a slot in the store of a key."""
    body = _BODY.pack(_MAGIC, FORMAT_VERSION, state, slot.number, slot.used, slot.block_hash, slot.root_tag, seal, key)
    return body + _check_of(body)


def unpack(record: bytes | memoryview, number: int, *, key: bytes) -> Slot | FaultKind | None:
    """Return what is in the slot of this number: a block, nothing, or a block that cannot be used, and why."""
    if record == EMPTY:
        return None
    body = record[: _BODY.size]
    if _check_of(body) != record[_BODY.size :]:
        return FaultKind.CORRUPT
    magic, version, state, own_number, used, block_hash, root_tag, seal, own_key = _BODY.unpack(body)
    if (magic, version, own_key) != (_MAGIC, FORMAT_VERSION, key):
        return FaultKind.STALE
    if own_number != number:
        return FaultKind.SWAPPED
    if state != State.WHOLE:
        return FaultKind.TORN
    if used > _MAX_USED:
        return FaultKind.CORRUPT
    return Slot(number=number, block_hash=BlockHash(block_hash), root_tag=root_tag, seal=seal, used=used, noted=used)


def count_records(index: bytes) -> int:
    """Return how many records are in the bytes of an index of any store."""
    return sum(index.startswith(_MAGIC, at) for at in range(0, len(index), RECORD_BYTES))


def _check_of(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, person=b"kvrelay-tierrec", digest_size=16).digest()

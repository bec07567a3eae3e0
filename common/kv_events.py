"""KV events: blocks that a worker stored and removed, as msgpack batches.

A stream starts with a snapshot; later batches are changes. Each message of the stream has a sequence number, and a
subscriber that misses one subscribes again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from common.block_hash import NO_HASHES, BlockHashes
from common.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Changes of one worker's reusable blocks, applied as a whole: removed first, then stored."""

    stored: BlockHashes = NO_HASHES
    removed: BlockHashes = NO_HASHES
    is_snapshot: bool = False

    @classmethod
    def of_changes(cls, is_stored: Mapping[BlockHash, bool]) -> "KvEvents":
        """Return the last change of each block."""
        if not is_stored:
            return NO_EVENTS
        stored, removed = ([each for each, last in is_stored.items() if last is kind] for kind in (True, False))
        return cls(stored=BlockHashes.of(stored), removed=BlockHashes.of(removed))

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.is_snapshot)


NO_EVENTS = KvEvents()


def encode_events(events: KvEvents) -> bytes:
    """Return the msgpack form: {"v": 1, "snap": bool, "add": bytes, "del": bytes}."""
    return bytes(
        msgpack.packb({"v": 1, "snap": events.is_snapshot, "add": events.stored.packed, "del": events.removed.packed})
    )


def decode_events(raw: bytes) -> KvEvents:
    """Invert `encode_events`. Raises ValueError for anything else."""
    try:
        batch = msgpack.unpackb(raw)
        if batch["v"] != 1:
            raise ValueError(f"KV event version {batch['v']}; this build reads 1")
        added, removed = batch["add"], batch["del"]
        if not (isinstance(added, bytes) and isinstance(removed, bytes)):
            raise ValueError("not a KV event batch: add and del must be bytes")
        return KvEvents(stored=BlockHashes(added), removed=BlockHashes(removed), is_snapshot=bool(batch["snap"]))
    except (KeyError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a KV event batch: {error}") from error

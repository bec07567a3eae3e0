"""KV events: blocks that a worker stored and removed, as msgpack batches.

A stream starts with a snapshot; later batches are changes. Each message of the stream has a sequence number, and a
subscriber that misses one subscribes again.

Where layers have window pages (`engine/pages/window_pages.py`), the events also say which blocks have one. A block is
stored without, unless the same batch says otherwise, and one that is removed loses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from common.block_hash import NO_HASHES, BlockHashes
from common.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Changes of one worker's reusable blocks, applied as a whole: removed first, then stored, then their pages."""

    stored: BlockHashes = NO_HASHES
    removed: BlockHashes = NO_HASHES
    paged: BlockHashes = NO_HASHES
    """Stored blocks that have got a window page."""
    unpaged: BlockHashes = NO_HASHES
    """Stored blocks that have lost it."""
    is_snapshot: bool = False

    @classmethod
    def of_changes(
        cls, is_stored: Mapping[BlockHash, bool], has_page: Mapping[BlockHash, bool] | None = None
    ) -> "KvEvents":
        """Return the last change of each block, and of its window page."""
        if not is_stored and not has_page:
            return NO_EVENTS
        stored, removed = _by_kind(is_stored)
        paged, unpaged = _by_kind(has_page) if has_page else (NO_HASHES, NO_HASHES)
        return cls(stored=stored, removed=removed, paged=paged, unpaged=unpaged)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.paged or self.unpaged or self.is_snapshot)


NO_EVENTS = KvEvents()


def _by_kind(changes: Mapping[BlockHash, bool]) -> tuple[BlockHashes, BlockHashes]:
    yes, no = ([each for each, last in changes.items() if last is kind] for kind in (True, False))
    return BlockHashes.of(yes), BlockHashes.of(no)


def encode_events(events: KvEvents) -> bytes:
    """Return the msgpack form: {"v": 1, "snap": bool, "add": bytes, "del": bytes}, with "page" and "unpage" if any."""
    batch = {"v": 1, "snap": events.is_snapshot, "add": events.stored.packed, "del": events.removed.packed}
    pages = {"page": events.paged.packed, "unpage": events.unpaged.packed}
    return bytes(msgpack.packb(batch | {name: packed for name, packed in pages.items() if packed}))


def decode_events(raw: bytes) -> KvEvents:
    """Invert `encode_events`. Raises ValueError for anything else."""
    try:
        batch = msgpack.unpackb(raw)
        if batch["v"] != 1:
            raise ValueError(f"KV event version {batch['v']}; this build reads 1")
        parts = batch["add"], batch["del"], batch.get("page", b""), batch.get("unpage", b"")
        if not all(isinstance(part, bytes) for part in parts):
            raise ValueError("not a KV event batch: add, del, page and unpage must be bytes")
        stored, removed, paged, unpaged = map(BlockHashes, parts)
        is_snapshot = bool(batch["snap"])
        return KvEvents(stored=stored, removed=removed, paged=paged, unpaged=unpaged, is_snapshot=is_snapshot)
    except (KeyError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a KV event batch: {error}") from error

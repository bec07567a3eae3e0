"""KV events: blocks that a worker stored and removed, as msgpack batches.

A stream starts with a snapshot; later batches are changes. Each message of the stream has a sequence number, and a
subscriber that misses one subscribes again.

Where layers have window pages (`engine/pages/window_pages.py`), the events also say which blocks have one. A block is
stored without, unless the same batch says otherwise, and one that is removed loses it.

A worker with tiers holds a block that is in its pages or in a tier, from which it reads the block back when a request
needs it. A block is stored in pages, unless the same batch says that it is offloaded, and one that is removed loses the
mark. One that comes back into pages is stored again.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgpack

from common.block_hash import NO_HASHES, BlockHashes
from common.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Changes of one worker's reusable blocks, applied as a whole: removed first, then stored, then their marks."""

    stored: BlockHashes = NO_HASHES
    removed: BlockHashes = NO_HASHES
    paged: BlockHashes = NO_HASHES
    """Stored blocks that have got a window page."""
    unpaged: BlockHashes = NO_HASHES
    """Stored blocks that have lost it."""
    offloaded: BlockHashes = NO_HASHES
    """Stored blocks that are in a tier only from now on."""
    is_snapshot: bool = False

    @classmethod
    def of_changes(
        cls,
        is_stored: Mapping[BlockHash, bool],
        has_page: Mapping[BlockHash, bool] | None = None,
        offloaded: Collection[BlockHash] = (),
    ) -> "KvEvents":
        """Return the last change of each block, of its window page, and the blocks that have been offloaded since."""
        if not is_stored and not has_page and not offloaded:
            return NO_EVENTS
        stored, removed = _by_kind(is_stored)
        paged, unpaged = _by_kind(has_page)
        return cls(
            stored=stored, removed=removed, paged=paged, unpaged=unpaged, offloaded=BlockHashes.of(list(offloaded))
        )

    @property
    def num_changes(self) -> int:
        """Changes of blocks and of their marks."""
        return sum(len(getattr(self, name)) for name in (*_CHANGES, *_MARKS))

    def __bool__(self) -> bool:
        return self.is_snapshot or any(getattr(self, name) for name in (*_CHANGES, *_MARKS))


_CHANGES = {"stored": "add", "removed": "del"}
_MARKS = {"paged": "page", "unpaged": "unpage", "offloaded": "off"}
"""Fields of a batch and their names on the wire; marks are sent only if there are any."""
NO_EVENTS = KvEvents()


def _by_kind(changes: Mapping[BlockHash, bool] | None) -> tuple[BlockHashes, BlockHashes]:
    if not changes:
        return NO_HASHES, NO_HASHES
    yes, no = ([each for each, last in changes.items() if last is kind] for kind in (True, False))
    return BlockHashes.of(yes), BlockHashes.of(no)


def encode_events(events: KvEvents) -> bytes:
    """Return the msgpack form: {"v": 1, "snap": bool, "add": bytes, "del": bytes}, with the marks if there are any."""
    batch = {"v": 1, "snap": events.is_snapshot, "add": events.stored.packed, "del": events.removed.packed}
    marks = {wire_name: getattr(events, name).packed for name, wire_name in _MARKS.items()}
    return bytes(msgpack.packb(batch | {name: packed for name, packed in marks.items() if packed}))


def decode_events(raw: bytes) -> KvEvents:
    """Invert `encode_events`. Raises ValueError for anything else."""
    try:
        batch = msgpack.unpackb(raw)
        if batch["v"] != 1:
            raise ValueError(f"KV event version {batch['v']}; this build reads 1")
        parts = {name: batch[wire_name] for name, wire_name in _CHANGES.items()}
        parts |= {name: batch[wire_name] for name, wire_name in _MARKS.items() if wire_name in batch}
        if not all(isinstance(part, bytes) for part in parts.values()):
            raise ValueError(f"not a KV event batch: {', '.join((*_CHANGES.values(), *_MARKS.values()))} must be bytes")
        return KvEvents(**{name: BlockHashes(part) for name, part in parts.items()}, is_snapshot=bool(batch["snap"]))
    except (KeyError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a KV event batch: {error}") from error

"""The blocks that a worker holds, in pages or in tiers, as its routers are told.

Routers learn what a worker holds at all, and which of it are *offloaded*: in a tier only. What is in pages is a leading
part of every chain, since pages keep parents longer than children; what is offloaded may follow it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from common.block_hash import BlockHashes
from common.ids import BlockHash
from common.kv_events import KvEvents

_PIECE = 1 << 14


class HeldBlocks:
    """Merges the events of pages and tiers. Event loop only."""

    def __init__(self) -> None:
        self.in_pages: set[BlockHash] = set()
        self.in_tiers: set[BlockHash] = set()

    def of_pages(self, events: KvEvents) -> KvEvents:
        """Return what routers are told of changes of the pages."""
        if not events.removed:
            self.in_pages.update(events.stored)
            return events
        removed = events.removed.digests()
        self.in_pages.difference_update(removed)
        self.in_pages.update(events.stored)
        offloaded, gone = events.removed.split(list(map(self.in_tiers.__contains__, removed)))
        return replace(events, removed=gone, offloaded=offloaded)

    def of_tiers(self, is_held: Mapping[BlockHash, bool]) -> KvEvents:
        """Return what routers are told of changes of the tiers."""
        added = {block_hash for block_hash, is_in in is_held.items() if is_in}
        self.in_tiers |= added
        self.in_tiers -= is_held.keys() - added
        offloaded = BlockHashes.of(added - self.in_pages)
        removed = BlockHashes.of(is_held.keys() - added - self.in_pages)
        return KvEvents(stored=offloaded, removed=removed, offloaded=offloaded)

    def snapshot(self, of_pages: KvEvents) -> KvEvents:
        """Return all blocks; `of_pages`: those in pages.

        Any thread, while the event loop goes on: what changes meanwhile is an event that comes afterwards. Works in
        pieces, between which the interpreter lock is free.
        """
        in_pages, offloaded = set[BlockHash](), list[BlockHash]()
        for piece in _pieces(of_pages.stored.digests()):
            in_pages.update(piece)
        for piece in _pieces(list(self.in_tiers)):
            offloaded += [block_hash for block_hash in piece if block_hash not in in_pages]
        packed = BlockHashes.of(offloaded)
        return replace(of_pages, stored=of_pages.stored + packed, offloaded=packed)


def _pieces(blocks: list[BlockHash]) -> Iterator[list[BlockHash]]:
    for first in range(0, len(blocks), _PIECE):
        yield blocks[first : first + _PIECE]

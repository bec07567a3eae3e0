"""The blocks that a worker holds, in pages or in tiers, as its routers are told.

Routers learn what a worker holds at all, and which of it are *offloaded*: in a tier only. What is in pages is a leading
part of every chain, since pages keep parents longer than children; what is offloaded may follow it.
"""

from collections.abc import Mapping
from dataclasses import replace

from common.block_hash import BlockHashes
from common.ids import BlockHash
from common.kv_events import KvEvents


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
        removed = set(events.removed)
        self.in_pages -= removed
        self.in_pages.update(events.stored)
        offloaded = (removed & self.in_tiers) - self.in_pages
        if not offloaded:
            return events
        return replace(
            events,
            removed=BlockHashes.of(removed - offloaded),
            offloaded=BlockHashes.of(offloaded),
        )

    def of_tiers(self, is_held: Mapping[BlockHash, bool]) -> KvEvents:
        """Return what routers are told of changes of the tiers."""
        added = {block_hash for block_hash, is_in in is_held.items() if is_in}
        self.in_tiers |= added
        self.in_tiers -= is_held.keys() - added
        offloaded = BlockHashes.of(added - self.in_pages)
        removed = BlockHashes.of(is_held.keys() - added - self.in_pages)
        return KvEvents(stored=offloaded, removed=removed, offloaded=offloaded)

    def snapshot(self, of_pages: KvEvents) -> KvEvents:
        """Return all blocks; `of_pages`: those in pages."""
        offloaded = BlockHashes.of(self.in_tiers.difference(of_pages.stored))
        return replace(of_pages, stored=of_pages.stored + offloaded, offloaded=offloaded)

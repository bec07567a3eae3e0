"""Cached blocks that travel between engines: pins for blocks that others pull, pages for blocks pulled to here.

A request whose prefix is pulled takes its place in line when it arrives (`Landing`), not when the pull is over. Pages
of a landing are private until their content is verified; then they are published after their parents, which the
landing holds, and the request finds them like any cached block. It holds them until it is admitted: in a long line
they would be the oldest ones, and the next pull would evict them. A growing sequence, and the first in line, may take
them back from the latest arrival (`StepPlanner`).
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.block_hash import BlockHashes
from common.errors import Refused
from common.ids import BlockId
from engine.pages import Pages
from engine.scheduler import Scheduler
from engine.sequence import Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class Landing:
    """A place in line, and pages that a pull fills before the request enters. Changed by `Landings` alone."""

    order: int
    queued_s: float
    hashes: BlockHashes
    """Hashes of the wanted leading blocks."""
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    """Page of each wanted block; empty until pages are granted."""
    retired_blocks: list[BlockId] = field(default_factory=list)
    num_cached_blocks: int = 0
    """Leading blocks that were cached here already."""
    num_landed_blocks: int = 0
    """Leading blocks that are here now, cached and pulled."""

    def block_ids(self) -> tuple[BlockId, ...]:
        """Return the block table as it is now, for another thread."""
        return tuple(map(BlockId, self.block_table))

    @property
    def pulled(self) -> range:
        """Indexes of the blocks that this pull brought."""
        return range(self.num_cached_blocks, self.num_landed_blocks)

    @property
    def num_missing_blocks(self) -> int:
        """Blocks to pull."""
        return len(self.hashes) - self.num_cached_blocks


class Landings:
    """Pins and landings of one engine. Engine thread only."""

    def __init__(self, scheduler: Scheduler, pages: Pages) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._pages = pages

    def pin(self, hashes: BlockHashes) -> tuple[BlockId, ...]:
        """Hold the pages of the longest cached prefix for a puller, until `unpin`."""
        block_ids = tuple(self._pool.match_prefix(hashes))
        self._pool.acquire(block_ids)
        return block_ids

    def unpin(self, block_ids: Seq[BlockId]) -> None:
        """Release the pages that `pin` returned."""
        self._pool.release(block_ids)

    def reserve(self, landing: Landing) -> Refused | None:
        """Hold the wanted blocks that are cached, and grant pages for the others when there is room.

        Pages that running sequences may grow into, or that the first in line needs, are not granted: neither waits for
        the pull of a later request.
        """
        assert not landing.block_table, "pages are granted already"
        cached = self._pool.match_prefix(landing.hashes)
        landing.num_cached_blocks = landing.num_landed_blocks = len(cached)
        num_fresh = landing.num_missing_blocks
        if num_fresh == 0:
            return None
        num_left = self._pool.num_free - self._pool.num_matched_free(cached) - num_fresh
        if num_left < self._scheduler.num_spoken_for:
            return Refused(reason=f"{self._pool.num_free} pages are free; too few for a pull", retry_after_s=0.5)
        self._pool.acquire(cached)
        self._pool.mark_reused(cached, len(cached))
        landing.block_table = array("i", [*cached, *self._pool.allocate(num_fresh)])
        return None

    def reserve_below(self, landing: Landing, values: Seq[float], max_blocks: int) -> Refused | None:
        """Like `reserve`, but a page is granted only if it is empty or worth less than the value of the block.

        `values` never rise. Blocks without a page are no longer wanted.
        """
        assert not landing.block_table, "pages are granted already"
        cached = self._pool.match_prefix(landing.hashes)
        landing.num_cached_blocks = landing.num_landed_blocks = num_cached_blocks = len(cached)
        if landing.num_missing_blocks == 0:
            return None
        self._pool.acquire(cached)
        num_spare = self._pool.num_free - self._scheduler.num_spoken_for
        granted: list[BlockId] = []
        for value in values[num_cached_blocks : num_cached_blocks + min(max_blocks, max(0, num_spare))]:
            if not self._pool.has_page_below(value):
                break
            granted += self._pool.allocate(1)
        if not granted:
            self._pool.release(cached)
            return Refused(reason="every free page is worth more", retry_after_s=0.5)
        landing.hashes = landing.hashes[: num_cached_blocks + len(granted)]
        landing.block_table = array("i", [*cached, *granted])
        return None

    def mark_reused(self, landing: Landing, num_blocks: int) -> int:
        """Mark the first `num_blocks` blocks as reused: they were at their source. Returns how many blocks are here."""
        num_held = min(landing.num_landed_blocks, len(landing.block_table))
        self._pool.mark_reused(landing.block_table, min(num_blocks, num_held))
        return landing.num_landed_blocks

    def commit(self, landing: Landing, num_blocks: int) -> None:
        """Publish the first `num_blocks` blocks, whose content is verified."""
        assert landing.num_landed_blocks <= num_blocks <= len(landing.block_table), (
            landing.num_landed_blocks,
            num_blocks,
        )
        for i in range(landing.num_landed_blocks, num_blocks):
            self._pages.publish_block(landing.block_table, i, landing.hashes[i], landing.retired_blocks)
        landing.num_landed_blocks = num_blocks

    def enter(self, landing: Landing, sequence: Sequence) -> None:
        """Hand the blocks that are here to the entering request; the landing then holds nothing."""
        sequence.pulled_blocks = landing.pulled
        sequence.landed_blocks = landing.block_table[: landing.num_landed_blocks]
        landing.block_table = landing.block_table[landing.num_landed_blocks :]
        self.release(landing)

    def release(self, landing: Landing) -> None:
        """Release all pages; published ones stay cached. Harmless when done already."""
        self._pool.release(landing.block_table)
        self._pool.release(landing.retired_blocks)
        landing.block_table, landing.retired_blocks = array("i"), []

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

from common.block_hash import BlockHashes, PrefixTokens
from common.errors import Refused
from common.ids import NO_ROOT, BlockId, HashRoot
from engine.sequence import Sequence
from engine.steps.block_tables import Pages
from engine.steps.scheduler import Scheduler
from engine.window_ids import NO_WINDOWS, WindowIds


@dataclass(slots=True, eq=False, kw_only=True)
class Landing:
    """A place in line, and pages that a pull fills before the request enters. Changed by `Landings` alone."""

    order: int
    queued_s: float
    hashes: BlockHashes
    """Hashes of the wanted leading blocks; others may be wanted while it has no pages."""
    root: HashRoot = NO_ROOT
    """Root of the hashes; empty when it is not known."""
    is_kept: bool = True
    """Whether its blocks may be kept outside the pages, too: not where another worker keeps them."""
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    """Page of each wanted block; empty until pages are granted."""
    window_blocks: range = range(0)
    """Blocks of the table whose window pages it needs."""
    windows: WindowIds = NO_WINDOWS
    """Their window pages."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Pages of leading cached blocks, held for a puller."""

    block_ids: tuple[BlockId, ...] = ()
    window_blocks: range = range(0)
    """Those of them whose window pages are held, too."""
    windows: WindowIds = NO_WINDOWS
    """Their window pages."""
    prefix: PrefixTokens | None = None
    """Tokens of the blocks, where an engine takes blocks in by their tokens."""


class Landings:
    """Pins and landings of one engine. Engine thread only."""

    def __init__(self, scheduler: Scheduler, pages: Pages) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._pages = pages
        self._windows = pages.windows

    def pin(self, hashes: BlockHashes) -> Pinned:
        """Hold the pages of the longest cached prefix for a puller, until `unpin`."""
        block_ids = tuple(self._pool.match_prefix(hashes))
        window_blocks = self._windows.hold_end(block_ids)
        if window_blocks is None:
            return Pinned()
        self._pool.acquire(block_ids)
        windows = self._windows.ids_of(block_ids, window_blocks)
        return Pinned(block_ids=block_ids, window_blocks=window_blocks, windows=windows)

    def unpin(self, pinned: Pinned) -> None:
        """Release the pages that `pin` returned."""
        self._windows.release_end(pinned.block_ids, pinned.window_blocks)
        self._pool.release(pinned.block_ids)

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
        block_table = array("i", [*cached, *self._pool.allocate(num_fresh)])
        window_blocks = self._windows.hold_end(block_table, ahead=self._scheduler.waiting[:1])
        if window_blocks is None:
            self._pool.release(block_table)
            return Refused(reason="too few window pages are free for a pull", retry_after_s=0.5)
        self._pool.mark_reused(cached, len(cached))
        landing.block_table, landing.window_blocks = block_table, window_blocks
        landing.windows = self._windows.ids_of(block_table, window_blocks)
        return None

    def reserve_below(self, landing: Landing, values: Seq[float], max_blocks: int) -> Refused | None:
        """Like `reserve`, but a page is granted only if it is empty or worth less than the value of the block.

        `values` never rise. Blocks without a page are no longer wanted.
        """
        assert not landing.block_table, "pages are granted already"
        if self._pool.windows is not None:
            return Refused(reason="a prefix is of no use here without the window before its end", retry_after_s=60.0)
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

    def commit(self, landing: Landing, num_blocks: int, prefix: PrefixTokens | None = None) -> None:
        """Publish the first `num_blocks` blocks, whose content is verified; their tokens do not matter here."""
        assert landing.num_landed_blocks <= num_blocks <= len(landing.block_table), (
            landing.num_landed_blocks,
            num_blocks,
        )
        if num_blocks < len(landing.block_table):  # the window at their end did not come
            self._release_windows(landing)
        root = landing.root if landing.is_kept else NO_ROOT
        for i in range(landing.num_landed_blocks, num_blocks):
            self._pages.publish_block(landing, i, landing.hashes[i], root)
        landing.num_landed_blocks = num_blocks

    def enter(self, landing: Landing, sequence: Sequence) -> None:
        """Hand the blocks that are here to the entering request; the landing then holds nothing."""
        is_usable = self._pool.windows is None or landing.num_landed_blocks == len(landing.block_table)
        if is_usable:
            sequence.pulled_blocks = landing.pulled
            sequence.landed_windows, landing.window_blocks = landing.window_blocks, range(0)
            sequence.landed_blocks = landing.block_table[: landing.num_landed_blocks]
            landing.block_table = landing.block_table[landing.num_landed_blocks :]
        self.release(landing)

    def release(self, landing: Landing) -> None:
        """Release all pages; published ones stay cached. Harmless when done already."""
        self._release_windows(landing)
        self._pool.release(landing.block_table)
        self._pool.release(landing.retired_blocks)
        landing.block_table, landing.retired_blocks = array("i"), []

    def _release_windows(self, landing: Landing) -> None:
        """Give back the window pages; those of blocks that are not published hold nothing."""
        self._windows.release_end(landing.block_table, landing.window_blocks, num_filled=landing.num_landed_blocks)
        landing.window_blocks = range(0)

"""Reads blocks from tiers into reserved pages, and gives a read up at once, however long the disk takes.

A disk may answer after a minute, or never. So reads have threads of their own, which no transfer waits for, and one
that is given up is not waited for either: its thread writes nothing more into the pages, which may have a new owner.
Until such a thread has its answer, no other read begins.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from common.clock import Clock
from common.ids import BlockHash, BlockId, HashRoot
from engine.kv_store import PIECE_BYTES, KvShape, KvStore
from engine.steps.landing import Landing
from kv_tiers.tiers import Tiers
from kv_transfer.transports.transport import to_end
from worker.tier_threads import TierThreads

logger = logging.getLogger(__name__)

_NUM_READERS = 4
_MAX_PIECE_BLOCKS = 256
SLOW_S = 0.25
"""Time after which a read that has brought nothing says something about the disk."""


def piece_blocks(shape: KvShape) -> int:
    """Return how many blocks are read or written before the books are brought up to date."""
    return min(_MAX_PIECE_BLOCKS, max(1, PIECE_BYTES // shape.block_bytes))


class Filling:
    """Fills pages or buffers in a thread, in order, until it is told to stop."""

    def __init__(
        self, tiers: Tiers, hashes: Sequence[BlockHash], root: HashRoot, fill: Callable[[int, memoryview], None]
    ) -> None:
        """`fill(i, data)` takes the bytes of the i-th block, in a thread."""
        self.num_filled = 0
        self.has_ended = False
        self._tiers = tiers
        self._hashes = hashes
        self._root = root
        self._fill_next = fill
        self._is_over = False
        self._lock = threading.Lock()
        """Held while a page or a buffer is written."""

    def run(self) -> None:
        """Fill them up to the first whose block is not there."""
        try:
            self._fill()
        finally:
            self.has_ended = True

    def _fill(self) -> None:
        for idx, block_hash in enumerate(self._hashes):
            if self._is_over:
                return
            data = self._tiers.get(block_hash, self._root)
            if data is None:
                return
            with self._lock:
                if self._is_over:
                    return
                self._fill_next(idx, memoryview(data))
                self.num_filled += 1

    def stop(self) -> None:
        """Return when nothing is written any more. Waits for the write of one block at most."""
        with self._lock:
            self._is_over = True

    def stop_soon(self) -> None:
        """Let it write one more block at most."""
        self._is_over = True


class TierReads:
    """Reads of one worker. Event loop only, but for what runs in threads."""

    def __init__(self, tiers: Tiers, store: KvStore, clock: Clock, on_read: Callable[[int, float], None]) -> None:
        """`on_read(bytes, seconds)` is called for each piece that was read."""
        self._tiers = tiers
        self._store = store
        self._clock = clock
        self._on_read = on_read
        self._stride = piece_blocks(store.shape)
        self._threads = TierThreads(_NUM_READERS, name="tier-read")
        self._num_stuck = 0

    @property
    def is_stuck(self) -> bool:
        """Whether a read that was given up still waits for its disk."""
        return self._num_stuck > 0

    async def read(self, landing: Landing, commit: Callable[[int], None]) -> int:
        """Fill the pages of a landing, in order; `commit(n)` is called when n leading blocks are there.

        Returns how many were read. Ends, even when cancelled, after the last write into the pages; what is there by
        then is committed.
        """
        hashes, pages = landing.hashes.digests(), landing.block_ids()
        first = end = landing.num_cached_blocks
        while end < len(pages):
            piece, some = hashes[end : end + self._stride], pages[end : end + self._stride]
            filling = Filling(self._tiers, piece, landing.root, partial(self._write, some))
            began_s = self._clock.monotonic()
            try:
                await self._run(filling)
            finally:
                try:
                    if not filling.has_ended:
                        await to_end(filling.stop)
                finally:
                    self._note(filling, self._clock.monotonic() - began_s)
                    if filling.num_filled:
                        end += filling.num_filled
                        commit(end)
            if filling.num_filled < len(piece):
                break
        return end - first

    def close(self) -> None:
        """End the threads, those that wait for their disk excepted. No read may be running."""
        self._threads.shutdown()

    def _write(self, pages: Sequence[BlockId], idx: int, data: memoryview) -> None:
        self._store.write_blocks([pages[idx]], data)

    async def _run(self, filling: Filling) -> None:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, filling.run)
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._num_stuck += 1
            running.add_done_callback(self._end_stuck)
            raise
        except Exception:  # a fault of the tiers costs blocks, never a request
            logger.exception("cannot read from the tiers")

    def _end_stuck(self, running: "asyncio.Future[None]") -> None:
        self._num_stuck -= 1
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.warning("a read from the tiers that was given up has failed", exc_info=error)

    def _note(self, filling: Filling, seconds: float) -> None:
        if filling.num_filled or seconds > SLOW_S:
            self._on_read(max(1, filling.num_filled) * self._store.shape.block_bytes, seconds)

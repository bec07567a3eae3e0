"""What tiers have for other workers: read into buffers, verified by the tier, and sent from there.

No page is used for it, so that a worker whose pages are full of running requests serves its tiers like any other.
Memory is bounded instead: `NUM_BUFFERS` buffers of `PIECE_BYTES`, or of a block where that is larger, of which one peer
gets `NUM_OF_PEER`. A buffer is free again when its piece was sent, or given up, and its thread has ended: a disk that
hangs keeps its buffers, and no others.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from common.clock import Clock
from common.ids import HashRoot
from engine.kv_store import KvShape
from kv_tiers.tiers import Tiers
from kv_transfer.offloaded import OffloadedBlocks, OffloadedPiece
from kv_transfer.transports.grpc_chunks import chunks_of
from kvrelay.v1 import kv_transfer_pb2 as pb
from worker.tier_reads import SLOW_S, Filling, piece_blocks

logger = logging.getLogger(__name__)

NUM_BUFFERS = 4
NUM_OF_PEER = 2
_NUM_READERS = 2
"""Threads that fill them: what reads for own requests has others."""


class Buffers:
    """Turns at the buffers: first come, first served, but that a peer has so many at most. Event loop only."""

    def __init__(self, *, num_buffers: int = NUM_BUFFERS, num_of_peer: int = NUM_OF_PEER) -> None:
        self._all = asyncio.Semaphore(num_buffers)
        self._num_of_peer = num_of_peer
        self._of_peers: dict[str, asyncio.Semaphore] = {}
        self._num_users: Counter[str] = Counter()
        """Pieces that hold a buffer or wait for one, by peer."""

    @property
    def num_users(self) -> int:
        """Pieces that hold a buffer or wait for one."""
        return self._num_users.total()

    async def take(self, peer: str) -> Callable[[], None]:
        """Wait for a buffer; returns what frees it."""
        of_peer = self._of_peers.setdefault(peer, asyncio.Semaphore(self._num_of_peer))
        self._num_users[peer] += 1
        try:
            await of_peer.acquire()
            try:
                await self._all.acquire()
            except BaseException:
                of_peer.release()
                raise
        except BaseException:
            self._leave(peer)
            raise

        def free() -> None:
            self._all.release()
            of_peer.release()
            self._leave(peer)

        return free

    def _leave(self, peer: str) -> None:
        self._num_users[peer] -= 1
        if not self._num_users[peer]:
            del self._num_users[peer], self._of_peers[peer]


class TierServing:
    """Reads of one worker's tiers for its peers. Event loop only, but for what runs in threads."""

    def __init__(self, tiers: Tiers, shape: KvShape, clock: Clock, on_read: Callable[[int, float], None]) -> None:
        """`on_read(bytes, seconds)` is called for each piece that was read."""
        self.buffers = Buffers()
        self.num_served = 0
        """Blocks that were read for peers."""
        self._tiers = tiers
        self._shape = shape
        self._clock = clock
        self._on_read = on_read
        self._stride = piece_blocks(shape)
        self._threads = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="tier-serve")
        self._roots: Counter[HashRoot] = Counter()
        """Roots of the reads under way."""
        self._num_left = 0
        """Reads that were given up and whose thread still waits."""

    @property
    def is_stuck(self) -> bool:
        """Whether all threads are at reads that were given up."""
        return self._num_left >= _NUM_READERS

    def is_reading(self, root: HashRoot) -> bool:
        """Whether blocks of a root are being read."""
        return self._roots[root] > 0

    @asynccontextmanager
    async def piece(self, wanted: OffloadedBlocks) -> AsyncIterator[OffloadedPiece]:
        """See `Offloaded.piece`."""
        free = await self.buffers.take(wanted.puller)
        messages: list[pb.FetchBlocksResponse] = []

        def fill(idx: int, data: memoryview) -> None:
            messages.extend(chunks_of(wanted.first_block + idx, data, max_bytes=wanted.chunk_bytes))

        filling = Filling(self._tiers, wanted.hashes[: self._stride].digests(), wanted.root, fill)
        began_s = self._clock.monotonic()
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, filling.run)
        except RuntimeError:  # the worker ends
            free()
            yield OffloadedPiece()
            return
        self._roots[wanted.root] += 1
        try:
            await self._until_read(running)
            seconds = self._clock.monotonic() - began_s
            if filling.num_filled or seconds > SLOW_S:
                self._on_read(max(1, filling.num_filled) * self._shape.block_bytes, seconds)
            self.num_served += filling.num_filled
            yield OffloadedPiece(num_blocks=filling.num_filled, messages=messages)
        finally:
            filling.stop_soon()
            was_left = not running.done()
            self._num_left += was_left

            def end(_running: "asyncio.Future[None]") -> None:
                self._num_left -= was_left
                self._roots[wanted.root] -= 1
                messages.clear()
                free()

            if was_left:
                running.add_done_callback(end)
            else:
                end(running)

    async def _until_read(self, running: "asyncio.Future[None]") -> None:
        try:
            await asyncio.shield(running)
        except Exception:  # a fault of the tiers costs blocks, never a transfer
            logger.exception("cannot read from the tiers for a peer")

    def close(self) -> None:
        """End the threads, those that wait for their disk excepted."""
        self._threads.shutdown(wait=False, cancel_futures=True)

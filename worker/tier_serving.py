"""What tiers have for other workers: read into buffers, verified by the tier, and sent from there.

No page is used for it, so that a worker whose pages are full of running requests serves its tiers like any other.
Memory is bounded instead: `NUM_BUFFERS` buffers of `PIECE_BYTES`, or of a block where that is larger, of which one peer
gets `NUM_OF_PEER`. A buffer is free again when its piece was sent, or given up, and its thread has ended: a disk that
hangs keeps its buffers, and no others.
"""

import asyncio
import logging
import mmap
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

import xxhash

from common.clock import Clock
from common.ids import BlockId, HashRoot
from engine.device.shared_memory import allocate_region
from engine.kv_store import KvShape, SharedRegion
from kv_tiers.tiers import Tiers
from kv_transfer.offloaded import OffloadedBlocks, OffloadedPiece
from kv_transfer.transports.grpc_chunks import chunks_of
from kv_transfer.transports.transport import sealed
from kvrelay.v1 import kv_transfer_pb2 as pb
from worker.tier_reads import SLOW_S, Filling, piece_blocks
from worker.tier_threads import TierThreads

logger = logging.getLogger(__name__)

NUM_BUFFERS = 4
NUM_OF_PEER = 2
_NUM_READERS = 2
"""Threads that fill them: what reads for own requests has others."""


@dataclass(slots=True, eq=False, kw_only=True)
class Buffer:
    """A buffer that is held."""

    number: int
    free: Callable[[], None]
    """Gives it back, once."""


class Buffers:
    """Turns at the buffers: first come, first served, but that a peer has so many at most. Event loop only."""

    def __init__(self, *, num_buffers: int = NUM_BUFFERS, num_of_peer: int = NUM_OF_PEER) -> None:
        self._all = asyncio.Semaphore(num_buffers)
        self._free = list(range(num_buffers))
        self._num_of_peer = num_of_peer
        self._of_peers: dict[str, asyncio.Semaphore] = {}
        self._num_users: Counter[str] = Counter()
        """Pieces that hold a buffer or wait for one, by peer."""

    @property
    def num_users(self) -> int:
        """Pieces that hold a buffer or wait for one."""
        return self._num_users.total()

    async def take(self, peer: str) -> Buffer:
        """Wait for a buffer, and hold it until it is freed."""
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
        number = self._free.pop()

        def free() -> None:
            self._free.append(number)
            self._all.release()
            of_peer.release()
            self._leave(peer)

        return Buffer(number=number, free=free)

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
        self._threads = TierThreads(_NUM_READERS, name="tier-serve")
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
        buffer = await self.buffers.take(wanted.puller)
        content = self._staged(buffer, wanted) if wanted.is_staged else _Chunks(wanted)
        filling = Filling(self._tiers, wanted.hashes[: self._stride].digests(), wanted.root, content.fill)
        took_s = 0.0

        def read() -> None:
            nonlocal took_s
            began_s = self._clock.monotonic()  # not before: other reads may be in front
            try:
                filling.run()
            finally:
                took_s = self._clock.monotonic() - began_s

        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, read)
        except RuntimeError:  # the worker ends
            buffer.free()
            yield OffloadedPiece()
            return
        self._roots[wanted.root] += 1
        try:
            await self._until_read(running)
            if filling.num_filled or took_s > SLOW_S:
                self._on_read(max(1, filling.num_filled) * self._shape.block_bytes, took_s)
            self.num_served += filling.num_filled
            yield OffloadedPiece(num_blocks=filling.num_filled, messages=content.messages)
        finally:
            filling.stop_soon()
            was_left = not running.done()
            self._num_left += was_left

            def end(_running: "asyncio.Future[None]") -> None:
                self._num_left -= was_left
                self._roots[wanted.root] -= 1
                self._roots += Counter()  # without those that are 0: clients can make up any number
                content.clear()
                buffer.free()

            if was_left:
                running.add_done_callback(end)
            else:
                end(running)

    @property
    def staging(self) -> pb.SharedMemory | None:
        """See `Offloaded`."""
        region = self._shared[1]
        if region is None:
            return None
        return pb.SharedMemory(
            pid=os.getpid(),
            fd=region.fd,
            size_bytes=region.size_bytes,
            nonce=region.nonce,
            num_blocks=NUM_BUFFERS * self._stride,
        )

    @cached_property
    def _shared(self) -> tuple[mmap.mmap, SharedRegion | None]:
        """Buffers for pullers on this host, [NUM_BUFFERS, stride, block_bytes]; they take memory as they are used."""
        return allocate_region(NUM_BUFFERS * self._stride * self._shape.block_bytes)

    def _staged(self, buffer: Buffer, wanted: OffloadedBlocks) -> "_Staged":
        first_place = buffer.number * self._stride
        return _Staged(self._shared[0], first_place * self._shape.block_bytes, BlockId(first_place), wanted.first_block)

    async def _until_read(self, running: "asyncio.Future[None]") -> None:
        try:
            await asyncio.shield(running)
        except Exception:  # a fault of the tiers costs blocks, never a transfer
            logger.exception("cannot read from the tiers for a peer")

    def close(self) -> None:
        """End the threads, those that wait for their disk excepted."""
        self._threads.shutdown()


class _Chunks:
    """Messages with the bytes of blocks."""

    def __init__(self, wanted: OffloadedBlocks) -> None:
        self.messages: list[pb.FetchBlocksResponse] = []
        self._wanted = wanted

    def fill(self, idx: int, data: memoryview) -> None:
        """Add a block."""
        wanted = self._wanted
        self.messages.extend(chunks_of(wanted.first_block + idx, data, max_bytes=wanted.chunk_bytes))

    def clear(self) -> None:
        """Drop the bytes."""
        self.messages.clear()


class _Staged:
    """Blocks in a buffer that the puller maps."""

    def __init__(self, memory: mmap.mmap, begin: int, first_place: BlockId, first_block: int) -> None:
        """`begin`: offset of the buffer in `memory`; `first_place`: the same, counted in blocks."""
        self._memory = memory
        self._begin = begin
        self._first_place = first_place
        self._first_block = first_block
        self._checksums: list[int] = []

    @property
    def messages(self) -> list[pb.FetchBlocksResponse]:
        """The message that names the blocks; none without any."""
        places = [BlockId(self._first_place + i) for i in range(len(self._checksums))]
        blocks = sealed(self._first_block, places, self._checksums).sealed
        return [pb.FetchBlocksResponse(staged=blocks)] if places else []

    def fill(self, idx: int, data: memoryview) -> None:
        """Add a block."""
        begin = self._begin + idx * len(data)
        self._memory[begin : begin + len(data)] = data
        self._checksums.append(xxhash.xxh3_64_intdigest(data))

    def clear(self) -> None:
        """Name no block any more."""
        self._checksums.clear()

"""The seam between the serving side and the blocks that a worker has outside its pages."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from common.block_hash import BlockHashes
from common.ids import HashRoot
from common.structured import end_all
from kvrelay.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedBlocks:
    """Blocks that a puller wants."""

    puller: str
    """Peer whose share of the buffers they take."""
    first_block: int
    """Index of the first of them among the blocks of the prompt."""
    hashes: BlockHashes
    root: HashRoot
    """Root of the hashes."""
    chunk_bytes: int
    """Most bytes of a chunk."""
    is_staged: bool = False
    """Whether the puller reads them out of the buffers, and no chunks are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedPiece:
    """The first of them."""

    num_blocks: int = 0
    """0: there are none."""
    messages: Sequence[pb.FetchBlocksResponse] = ()
    """Messages that bring them."""


class Offloaded(Protocol):
    """Blocks outside the pages. Event loop only."""

    @property
    def staging(self) -> pb.SharedMemory | None:
        """The buffers, for pullers on this host; None: they are not shared."""
        ...

    def num_held(self, hashes: BlockHashes, first_block: int) -> int:
        """Return how many leading blocks a puller has once it has got these, if it has those before `first_block`."""
        ...

    def piece(self, wanted: OffloadedBlocks) -> AbstractAsyncContextManager[OffloadedPiece]:
        """Hold verified bytes of the first wanted blocks in a buffer, as many as are there and as it takes.

        Waits for a buffer: there are so many for all pullers, and fewer for each of them.
        """
        ...


class ReadAhead:
    """Reads one piece while the one before is sent; leaving the block ends all of them. Event loop only."""

    def __init__(self, offloaded: Offloaded, *, timeout_s: float) -> None:
        """`timeout_s`: longest time for which a piece is waited for."""
        self._offloaded = offloaded
        self._timeout_s = timeout_s
        self._reads: deque[_Read] = deque()
        """The piece that is used, and the one after it."""
        self._is_first_used = False
        self.waited_s = 0.0
        """Time for which pieces were waited for."""

    def begin(self, wanted: OffloadedBlocks) -> None:
        """Begin to read the piece after those that were begun."""
        self._reads.append(_Read(self._offloaded, wanted))

    async def next(self) -> OffloadedPiece:
        """Give up the piece that was used, and return the one after it; an empty one when it takes too long."""
        if self._is_first_used:
            await end_all([self._reads.popleft().task])
        self._is_first_used = True
        now_s = asyncio.get_running_loop().time
        begun_s = now_s()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(self._reads[0].piece)
        except TimeoutError:
            return OffloadedPiece()
        finally:
            self.waited_s += now_s() - begun_s

    async def __aenter__(self) -> "ReadAhead":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await end_all([read.task for read in self._reads])


class _Read:
    """One piece: being read, or held, until its task is ended."""

    def __init__(self, offloaded: Offloaded, wanted: OffloadedBlocks) -> None:
        loop = asyncio.get_running_loop()
        self.piece: asyncio.Future[OffloadedPiece] = loop.create_future()
        self.task = loop.create_task(self._hold(offloaded, wanted), name="offloaded-read")

    async def _hold(self, offloaded: Offloaded, wanted: OffloadedBlocks) -> None:
        try:
            async with offloaded.piece(wanted) as piece:
                self.piece.set_result(piece)
                await asyncio.Event().wait()
        except Exception as error:
            if self.piece.done():
                raise
            self.piece.set_exception(error)

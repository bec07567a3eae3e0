"""Pages in host memory that the puller reads with NIXL: by RDMA where UCX finds it, else by TCP or shared memory.

The server registers its pages once; with a transfer it sends the metadata of its agent, and for blocks that are final
their pages and checksums. The puller reads into memory of its own that no engine uses, verifies the checksums there,
and fills its pages. A read that comes too late, after the end of the lease, finds other bytes and fails; and one that
is given up, because the peer has died, cannot write into pages with a new owner.

A process that has the metadata may read all pages of that worker for as long as the worker runs, and UCX does not
encrypt, so this transport is for trusted networks only. Pages in device memory are refused at start: NIXL reads those,
too, but this code was never run with them.
"""

import asyncio
import mmap
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from common.config import TransferConfig
from common.errors import KvCorrupt, TransferError
from common.ids import BlockId, WorkerId
from engine.kv_store import NONCE_BYTES, KvStore, SharedRegion, check_ids, page_bytes_of
from kv_transfer.transports.nixl_agent import Agent, ReadGivenUp, Registered, Spans, spans_of
from kv_transfer.transports.transport import (
    PeerLife,
    PeerMemoryUnreachable,
    PullTarget,
    SealedReceiver,
    Transport,
    TransportUnusable,
    checksums_of,
    sealed,
)
from kvrelay.v1 import kv_transfer_pb2 as pb

_READ_TIMEOUT_S = 5.0  # of a few MiB


class Nixl(Transport):
    """See the module. The first transfer from a peer connects to it, which takes a tenth of a second or more."""

    name = "nixl"
    payload = "sealed"
    pulls_from_itself = False

    def __init__(self, store: KvStore, config: TransferConfig, *, read_timeout_s: float = _READ_TIMEOUT_S) -> None:
        """Raises TransportUnusable."""
        super().__init__(store, config)
        region = store.shared_region
        if region is None:
            raise TransportUnusable(
                "cannot use nixl: this worker's pages are in device memory, which has not been run with NIXL;"
                " leave it out"
            )
        self._region = region
        self._agent = Agent(read_timeout_s=read_timeout_s)
        self._pages = Registered(mmap.mmap(region.fd, region.size_bytes))
        self._agent.register(self._pages)
        self._metadata = self._agent.metadata()

    def describe(self, opened: pb.FetchOpened) -> None:
        """See `Transport`."""
        memory = opened.nixl_memory
        memory.agent, memory.address, memory.size_bytes = self._metadata, self._pages.address, self._region.size_bytes
        memory.nonce, memory.num_blocks, memory.page_order = (
            self._region.nonce,
            self._store.num_blocks,
            self._region.page_order,
        )

    def seal(self, first_block: int, block_ids: Seq[BlockId]) -> list[pb.FetchBlocksResponse]:
        """See `Transport`."""
        return [
            sealed(
                first_block,
                block_ids,
                checksums_of(self._store.read_blocks(block_ids), page_bytes_of(self._store, block_ids)),
            )
        ]

    @asynccontextmanager
    async def fetch(self, peer: PeerLife, opened: pb.FetchOpened, target: PullTarget) -> AsyncIterator[SealedReceiver]:
        """See `Transport`."""
        reader = _Reader(self._agent, self._store, self._region, peer.worker_id, opened.nixl_memory, target)
        loop = asyncio.get_running_loop()
        try:
            try:
                await loop.run_in_executor(None, reader.connect)
            except TransferError as error:
                raise PeerMemoryUnreachable(str(error)) from error
            yield reader
        finally:
            reader.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeerPages:
    """Pages of one kind in a peer's memory, [num_pieces, num_pages, piece_bytes]."""

    address: int
    num_pages: int
    page_ids: Seq[int]
    """Wanted ones, counted from the first of this kind."""
    num_pieces: int
    piece_bytes: int


class _Reader(SealedReceiver):
    """Reads a peer's pages into scratch memory, where the checksums are verified, and copies them from there."""

    def __init__(
        self,
        agent: "Agent",
        store: KvStore,
        region: SharedRegion,
        peer: WorkerId,
        memory: pb.NixlMemory,
        target: PullTarget,
    ) -> None:
        super().__init__(target)
        self._agent = agent
        self._store = store
        self._region = region
        self._peer = peer
        self._memory = memory
        self._scratch: Registered | None = None

    def connect(self) -> None:
        """Find the peer's memory. Raises TransferError unless it is the peer's KV memory, in our page order."""
        memory = self._memory
        self._store.shape.check_region(memory.size_bytes, memory.num_blocks)
        if memory.page_order != self._region.page_order:
            raise TransferError("its processor keeps the elements of a page in another order than ours")
        self._agent.add(self._peer, memory.agent)
        scratch = self._room(NONCE_BYTES)
        end = memory.address + memory.size_bytes
        self._read(spans_of([scratch.address], NONCE_BYTES), spans_of([end - NONCE_BYTES], NONCE_BYTES))
        if len(memory.nonce) != NONCE_BYTES or scratch.memory[:NONCE_BYTES] != memory.nonce:
            raise TransferError("the memory at its address is not the peer's KV memory")

    def copy(self, blocks: pb.SealedBlocks, pages: Seq[BlockId]) -> None:
        """See `SealedReceiver`."""
        num_read, theirs = len(pages), self._pages_of(blocks.block_ids)
        check_ids(theirs.page_ids, theirs.num_pages)
        num_bytes = num_read * theirs.num_pieces * theirs.piece_bytes
        scratch = self._room(num_bytes)
        pieces = np.arange(theirs.num_pieces, dtype=np.uint64)[:, None]
        sources = pieces * theirs.num_pages + np.array(theirs.page_ids, dtype=np.uint64)
        targets = np.arange(theirs.num_pieces * num_read, dtype=np.uint64)
        self._read(
            spans_of(targets * theirs.piece_bytes + scratch.address, theirs.piece_bytes),
            spans_of(sources.reshape(-1) * theirs.piece_bytes + theirs.address, theirs.piece_bytes),
        )
        # The pieces read lie as in a region of so many pages.
        read = np.frombuffer(scratch.memory, np.uint8, num_bytes).reshape(theirs.num_pieces, num_read, -1)
        data = np.ascontiguousarray(read.transpose(1, 0, 2)).reshape(-1).data
        if checksums_of(data, num_bytes // num_read) != list(blocks.checksums):
            raise KvCorrupt("a checksum is wrong, or missing")
        self._store.write_blocks(pages, data)

    def _pages_of(self, block_ids: Seq[int]) -> "_PeerPages":
        """Return where the peer has pages of the kind that these ids name."""
        shape, memory = self._store.shape, self._memory
        num_blocks = memory.num_blocks
        if shape.windowed is not None and block_ids and block_ids[0] >= num_blocks:
            return _PeerPages(
                address=memory.address + num_blocks * shape.block_bytes,
                num_pages=shape.check_region(memory.size_bytes, num_blocks),
                page_ids=[block_id - num_blocks for block_id in block_ids],
                num_pieces=self._region.num_window_pieces,
                piece_bytes=shape.window_page_bytes // self._region.num_window_pieces,
            )
        num_pieces = self._region.num_pieces
        return _PeerPages(
            address=memory.address,
            num_pages=num_blocks,
            page_ids=block_ids,
            num_pieces=num_pieces,
            piece_bytes=shape.block_bytes // num_pieces,
        )

    def close(self) -> None:
        """Give the memory back, unless a read that was given up may still write into it."""
        if self._scratch is not None:
            self._agent.unregister(self._scratch)
            self._scratch = None

    def _read(self, targets: Spans, sources: Spans) -> None:
        try:
            self._agent.read(self._peer, targets, sources)
        except ReadGivenUp:
            self._scratch = None  # the agent keeps it
            raise

    def _room(self, num_bytes: int) -> "Registered":
        """Return scratch memory for at least so many bytes."""
        if self._scratch is None or len(self._scratch.memory) < num_bytes:
            self.close()
            self._scratch = Registered(mmap.mmap(-1, num_bytes))
            self._agent.register(self._scratch)
        return self._scratch

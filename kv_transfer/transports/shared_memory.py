"""Pages in host memory that processes of one host share: the puller copies them and verifies the copy."""

import os
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager

from common.errors import KvCorrupt, TransferError
from common.ids import BlockId
from engine.device.shared_memory import map_peer_region
from engine.kv_store import KvStore, PeerPages, page_bytes_of
from kv_transfer.transports.transport import (
    PeerLife,
    PeerMemoryUnreachable,
    PullTarget,
    SealedReceiver,
    Transport,
    checksums_of,
    is_same_host,
    sealed,
)
from kvrelay.v1 import kv_transfer_pb2 as pb


class SharedMemory(Transport):
    """See the module. Our own pages may be in any memory: what is pulled passes through host memory."""

    name = "shm"
    payload = "sealed"

    def reaches(self, opened: pb.OpenFetch) -> bool:
        """See `Transport`."""
        return is_same_host(opened) and self._store.shared_region is not None

    def describe(self, opened: pb.FetchOpened) -> None:
        """See `Transport`."""
        region = self._store.shared_region
        assert region is not None, "`reaches` has looked"
        shared = opened.shared_memory
        shared.pid, shared.fd, shared.size_bytes = os.getpid(), region.fd, region.size_bytes
        shared.nonce, shared.num_blocks = region.nonce, self._store.num_blocks

    def seal(self, first_block: int, block_ids: Seq[BlockId]) -> list[pb.FetchBlocksResponse]:
        """See `Transport`."""
        data = self._store.read_blocks(block_ids)
        return [sealed(first_block, block_ids, checksums_of(data, page_bytes_of(self._store, block_ids)))]

    @asynccontextmanager
    async def fetch(self, peer: PeerLife, opened: pb.FetchOpened, target: PullTarget) -> AsyncIterator[SealedReceiver]:
        """See `Transport`. Mapped for this one transfer: a mapping that is kept would keep a dead peer's memory."""
        shared = opened.shared_memory
        try:
            region = map_peer_region(pid=shared.pid, fd=shared.fd, size_bytes=shared.size_bytes, nonce=shared.nonce)
            pages = self._store.map_peer(memoryview(region), shared.num_blocks)
        except (OSError, TransferError) as error:
            raise PeerMemoryUnreachable(str(error)) from error
        yield _Copier(pages, self._store, target)


class _Copier(SealedReceiver):
    """Copies blocks into host memory of our own, verifies their checksums there, and fills the pages."""

    def __init__(self, pages: PeerPages, store: KvStore, target: PullTarget) -> None:
        super().__init__(target)
        self._pages = pages
        self._store = store

    def copy(self, blocks: pb.SealedBlocks, pages: Seq[BlockId]) -> None:
        """See `SealedReceiver`."""
        data = self._pages.read_blocks(blocks.block_ids)
        if checksums_of(data, page_bytes_of(self._store, pages)) != list(blocks.checksums):
            raise KvCorrupt("a checksum is wrong, or missing")
        self._store.write_blocks(pages, data)

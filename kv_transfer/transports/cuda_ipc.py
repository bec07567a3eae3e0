"""Pages in memory that the puller's card can read, its own or another card's: the puller copies from card to card.

There are no checksums: they would cost as much as the copy, on both sides. Instead, the nonce proves that the memory is
the right one, nothing writes to the pages while they are pinned, and they are pinned until the acknowledgement, which
the server refuses when it has unpinned them before.
"""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.config import TransferConfig
from common.errors import TransferError
from common.ids import BlockId
from engine.kv_store import DevicePeerPages, DeviceRegion, KvStore
from kv_transfer.transports.transport import (
    PeerLife,
    PeerMemoryUnreachable,
    PullTarget,
    SealedReceiver,
    Transport,
    is_same_host,
    sealed,
)
from kvrelay.v1 import kv_transfer_pb2 as pb


class CudaIpc(Transport):
    """See the module. Pulls from one peer share a mapping: making one takes milliseconds, and closing it waits.

    A mapping lives as long as the connection to its peer: memory of a dead process stays allocated while it is mapped,
    and a successor needs it for pages of its own.
    """

    name = "cuda_ipc"
    payload = "sealed"
    reads_pages = False
    pulls_from_itself = False

    def __init__(self, store: KvStore, config: TransferConfig) -> None:
        super().__init__(store, config)
        self._mappings: dict[PeerLife, _Mapping] = {}

    def offer(self, opened: pb.OpenFetch) -> bool:
        """See `Transport`."""
        sharing = self._store.device_sharing
        if sharing is not None:
            opened.readable_devices.extend(sharing.readable_devices)
        return sharing is not None

    def reaches(self, opened: pb.OpenFetch) -> bool:
        """See `Transport`."""
        sharing = self._store.device_sharing
        return sharing is not None and is_same_host(opened) and sharing.region.device_uuid in opened.readable_devices

    def describe(self, opened: pb.FetchOpened) -> None:
        """See `Transport`."""
        sharing = self._store.device_sharing
        assert sharing is not None, "`reaches` has looked"
        region, memory = sharing.region, opened.device_memory
        memory.handle, memory.offset_bytes, memory.region_bytes = region.handle, region.offset_bytes, region.size_bytes
        memory.device_uuid, memory.nonce, memory.num_blocks = region.device_uuid, region.nonce, self._store.num_blocks

    def seal(self, first_block: int, block_ids: Seq[BlockId]) -> list[pb.FetchBlocksResponse]:
        """See `Transport`."""
        return [sealed(first_block, block_ids)]

    @asynccontextmanager
    async def fetch(self, peer: PeerLife, opened: pb.FetchOpened, target: PullTarget) -> AsyncIterator[SealedReceiver]:
        """See `Transport`."""
        mapping = self._mappings.get(peer)
        if mapping is None:
            mapping = self._mappings[peer] = _Mapping(self._map(opened.device_memory))
        mapping.num_users += 1
        try:
            try:
                pages = await asyncio.shield(mapping.pages)
            except TransferError as error:
                raise PeerMemoryUnreachable(str(error)) from error
            yield _Copier(pages, target)
        finally:
            mapping.num_users -= 1
            if self._mappings.get(peer) is not mapping:
                mapping.close_if_unused()

    def forget(self, peer: PeerLife) -> None:
        """See `Transport`. The pulls that use a mapping end first."""
        mapping = self._mappings.pop(peer, None)
        if mapping is not None:
            mapping.close_if_unused()

    def _map(self, memory: pb.DeviceMemory) -> "asyncio.Future[DevicePeerPages]":
        sharing = self._store.device_sharing
        if sharing is None:
            raise PeerMemoryUnreachable("our own pages are not in device memory")
        region = DeviceRegion(
            handle=memory.handle,
            offset_bytes=memory.offset_bytes,
            size_bytes=memory.region_bytes,
            device_uuid=memory.device_uuid,
            nonce=memory.nonce,
        )
        return asyncio.get_running_loop().run_in_executor(None, sharing.map_peer, region, memory.num_blocks)


@dataclass(slots=True)
class _Mapping:
    """A peer's device memory, mapped or being mapped."""

    pages: "asyncio.Future[DevicePeerPages]"
    num_users: int = 0

    def close_if_unused(self) -> None:
        """Close it, once it is made. Closing waits for the device: an executor thread does it."""
        if not self.num_users:
            self.pages.add_done_callback(_close)


def _close(pages: "asyncio.Future[DevicePeerPages]") -> None:
    if not pages.cancelled() and pages.exception() is None:
        pages.get_loop().run_in_executor(None, pages.result().close)


class _Copier(SealedReceiver):
    def __init__(self, pages: DevicePeerPages, target: PullTarget) -> None:
        super().__init__(target)
        self._pages = pages

    def copy(self, blocks: pb.SealedBlocks, pages: Seq[BlockId]) -> None:
        """See `SealedReceiver`."""
        self._pages.copy_blocks(blocks.block_ids, pages)

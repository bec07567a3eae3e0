"""Other workers' pages, where they can be mapped: in host memory, or in the memory of the card that both are on.

A peer whose memory could not be mapped is not asked for it again in this life of its: the next pull, which the router
plans after the failed one, goes by the next transport.
"""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import xxhash

from common.errors import KvIncomplete, TransferError
from common.ids import BlockId, Epoch, WorkerId
from engine.executor import DevicePeerPages, DeviceRegion, KvStore, PeerPages
from engine.shared_memory import map_peer_region
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import worker_pb2

# A mapping serves the pulls that follow closely, and is gone before a successor of a dead peer allocates its own pages.
_KEEP_MAPPED_S = 1.0


class MappedPeer(Protocol):
    """A peer's pages, mapped."""

    def copy(self, sealed: pb.SealedBlocks, targets: Seq[BlockId]) -> None:
        """Copy the sealed blocks over our pages; they are there when this returns. Any thread. Raises KvIncomplete."""
        ...


class PeerMemory:
    """Maps peers' memory for the pulls of one worker. Event loop only."""

    def __init__(self, *, store: KvStore, transports: tuple[int, ...], keep_mapped_s: float = _KEEP_MAPPED_S) -> None:
        self._store = store
        self._transports = transports
        self._keep_mapped_s = keep_mapped_s
        self._unmappable: dict[tuple[WorkerId, int], Epoch] = {}
        self._mappings: dict[tuple[WorkerId, Epoch], _DeviceMapping] = {}

    @property
    def device_uuid(self) -> str:
        """The card that holds our pages; "" for host memory."""
        sharing = self._store.device_sharing
        return sharing.region.device_uuid if sharing is not None else ""

    def offers(self, peer: WorkerId, epoch: Epoch) -> list[int]:
        """Return the transports that a pull from this life of a peer may use, preferred first."""
        return [
            transport
            for transport in self._transports
            if self._unmappable.get((peer, transport)) != epoch
            and (transport != worker_pb2.KV_TRANSPORT_CUDA_IPC or self._store.device_sharing is not None)
        ]

    @asynccontextmanager
    async def mapped(self, peer: WorkerId, epoch: Epoch, opened: pb.FetchOpened) -> AsyncIterator[MappedPeer | None]:
        """Hold the memory that the peer tells of for one pull; None where its transport shares none.

        Raises KvIncomplete when it cannot be mapped.
        """
        try:
            if opened.transport == worker_pb2.KV_TRANSPORT_SHM:
                yield self._map_host(opened.shared_memory)
            elif opened.transport == worker_pb2.KV_TRANSPORT_CUDA_IPC:
                async with self._device_pages((peer, epoch), opened.device_memory) as pages:
                    yield _DevicePeer(pages)
            else:
                yield None
        except _Unmappable as error:
            self._unmappable[peer, opened.transport] = epoch
            raise KvIncomplete(f"the memory of {peer} cannot be mapped: {error}") from error

    def _map_host(self, shared: pb.SharedMemory) -> "_HostPeer":
        """Map for this one pull: a mapping that was kept would keep a dead peer's memory."""
        try:
            region = map_peer_region(pid=shared.pid, fd=shared.fd, size_bytes=shared.size_bytes, nonce=shared.nonce)
            return _HostPeer(self._store.map_peer(memoryview(region), shared.num_blocks), self._store)
        except (OSError, TransferError) as error:
            raise _Unmappable(str(error)) from error

    @asynccontextmanager
    async def _device_pages(
        self, key: tuple[WorkerId, Epoch], memory: pb.DeviceMemory
    ) -> AsyncIterator[DevicePeerPages]:
        """Hold a mapping that pulls share, since making one takes milliseconds and unmaking it waits for the device."""
        mapping = self._mappings.get(key)
        if mapping is None:
            mapping = self._mappings[key] = _DeviceMapping(self._map_device(memory))
        mapping.num_users += 1
        if mapping.expiry is not None:
            mapping.expiry.cancel()
        try:
            try:
                pages = await asyncio.shield(mapping.pages)
            except TransferError as error:
                raise _Unmappable(str(error)) from error
            yield pages
        finally:
            mapping.num_users -= 1
            if mapping.num_users == 0:
                loop = asyncio.get_running_loop()
                mapping.expiry = loop.call_later(self._keep_mapped_s, self._expire, key)

    def _map_device(self, memory: pb.DeviceMemory) -> "asyncio.Future[DevicePeerPages]":
        sharing = self._store.device_sharing
        if sharing is None:
            raise _Unmappable("our own pages are not in device memory")
        region = DeviceRegion(
            handle=memory.handle,
            offset_bytes=memory.offset_bytes,
            size_bytes=memory.size_bytes,
            device_uuid=memory.device_uuid,
            nonce=memory.nonce,
        )
        return asyncio.get_running_loop().run_in_executor(None, sharing.map_peer, region, memory.num_blocks)

    def _expire(self, key: tuple[WorkerId, Epoch]) -> None:
        self._mappings.pop(key).pages.add_done_callback(_close)


class _Unmappable(Exception):
    """Why a peer's memory cannot be mapped."""


@dataclass(slots=True)
class _DeviceMapping:
    """A peer's device memory, mapped or being mapped."""

    pages: "asyncio.Future[DevicePeerPages]"
    num_users: int = 0
    expiry: asyncio.TimerHandle | None = None
    """Set while nobody uses it."""


def _close(pages: "asyncio.Future[DevicePeerPages]") -> None:
    if not pages.cancelled() and pages.exception() is None:
        pages.get_loop().run_in_executor(None, pages.result().close)


class _HostPeer:
    """Copies by way of our own memory, where the checksums are verified."""

    def __init__(self, pages: PeerPages, store: KvStore) -> None:
        self._pages = pages
        self._store = store

    def copy(self, sealed: pb.SealedBlocks, targets: Seq[BlockId]) -> None:
        """See `MappedPeer`."""
        size = self._store.shape.block_bytes
        if len(sealed.checksums) != len(sealed.block_ids):
            raise KvIncomplete(f"{len(sealed.block_ids)} blocks came with {len(sealed.checksums)} checksums")
        try:
            data = self._pages.read_blocks(sealed.block_ids)
        except TransferError as error:
            raise KvIncomplete(f"the sealed blocks cannot be read: {error}") from error
        for i, checksum in enumerate(sealed.checksums):
            if xxhash.xxh3_64_intdigest(data[i * size : (i + 1) * size]) != checksum:
                raise KvIncomplete(f"block {sealed.first_block + i} has a wrong checksum")
        self._store.write_blocks(targets, data)


class _DevicePeer:
    """Copies inside the card. There are no checksums: they would cost as much as the copy, on both sides.

    What holds instead: the memory is the right one (its nonce), nobody writes to the pages while they are pinned, and
    they are pinned until our acknowledgement, which the peer refuses when it has unpinned them before.
    """

    def __init__(self, pages: DevicePeerPages) -> None:
        self._pages = pages

    def copy(self, sealed: pb.SealedBlocks, targets: Seq[BlockId]) -> None:
        """See `MappedPeer`."""
        try:
            self._pages.copy_blocks(sealed.block_ids, targets)
        except TransferError as error:
            raise KvIncomplete(f"the sealed blocks cannot be copied: {error}") from error

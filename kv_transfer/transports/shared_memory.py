"""Pages in host memory that processes of one host share: the puller copies them and verifies the copy.

Of pages in device memory the server copies blocks into a ring in such memory (`HostRing`), and the puller fills its
pages from there. There are no checksums then: nothing writes to a slot that is lent, and the server gives the slot to
another transfer only once this one has answered, or has failed.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from functools import cached_property

from common.errors import KvCorrupt, TransferError
from common.ids import BlockId
from engine.device.shared_memory import map_peer_region
from engine.kv_store import NONCE_BYTES, HostRing, KvStore, PeerPages, SharedRegion, check_ids, page_bytes_of
from kv_transfer.transports.transport import (
    Lending,
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
        return is_same_host(opened) and self._region is not None

    def describe(self, opened: pb.FetchOpened) -> None:
        """See `Transport`."""
        region, ring, shared = self._region, self._ring, opened.shared_memory
        assert region is not None, "`reaches` has looked"
        shared.pid, shared.fd, shared.size_bytes, shared.nonce = os.getpid(), region.fd, region.size_bytes, region.nonce
        shared.num_blocks = self._store.num_blocks if ring is None else ring.num_slots * ring.blocks_per_slot
        opened.lends = ring is not None

    def seal(self, first_block: int, block_ids: Seq[BlockId]) -> list[pb.FetchBlocksResponse]:
        """See `Transport`."""
        data = self._store.read_blocks(block_ids)
        return [sealed(first_block, block_ids, checksums_of(data, page_bytes_of(self._store, block_ids)))]

    def lending(self) -> Lending | None:
        """See `Transport`."""
        return None if self._ring is None else Lending(self._free_slots, self._fill)

    @cached_property
    def _free_slots(self) -> "asyncio.Queue[int]":
        slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(0 if self._ring is None else self._ring.num_slots):
            slots.put_nowait(slot)
        return slots

    @property
    def _ring(self) -> HostRing | None:
        """The ring, unless the pages themselves can be mapped."""
        return self._store.host_ring if self._store.shared_region is None else None

    @property
    def _region(self) -> SharedRegion | None:
        return self._store.shared_region or (self._ring.region if self._ring is not None else None)

    def _fill(self, slot: int, first_block: int, block_ids: Seq[BlockId]) -> list[pb.FetchBlocksResponse]:
        assert self._ring is not None, "`lending` has looked"
        return [sealed(first_block, list(map(BlockId, self._ring.fill(slot, block_ids))))]

    @asynccontextmanager
    async def fetch(self, peer: PeerLife, opened: pb.FetchOpened, target: PullTarget) -> AsyncIterator[SealedReceiver]:
        """See `Transport`. Mapped for this one transfer: a mapping that is kept would keep a dead peer's memory."""
        shared = opened.shared_memory
        try:
            region = map_peer_region(pid=shared.pid, fd=shared.fd, size_bytes=shared.size_bytes, nonce=shared.nonce)
            if opened.lends:
                self._store.shape.check_region(shared.size_bytes, shared.num_blocks)
            else:
                pages = self._store.map_peer(memoryview(region), shared.num_blocks)
        except (OSError, TransferError) as error:
            raise PeerMemoryUnreachable(str(error)) from error
        if opened.lends:
            with region, memoryview(region) as ring:
                yield _RingReader(ring, self._store, target)
        else:
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


class _RingReader(SealedReceiver):
    """Fills pages from a mapped ring, where blocks lie one after the other."""

    def __init__(self, ring: memoryview, store: KvStore, target: PullTarget) -> None:
        super().__init__(target)
        self._ring = ring
        self._store = store

    def copy(self, blocks: pb.SealedBlocks, pages: Seq[BlockId]) -> None:
        """See `SealedReceiver`."""
        places, size = blocks.block_ids, self._store.shape.block_bytes
        if not places or list(places) != list(range(places[0], places[0] + len(places))):
            raise KvCorrupt("the blocks of a slot do not follow each other, or there are none")
        check_ids(places, (len(self._ring) - NONCE_BYTES) // size)
        with self._ring[places[0] * size : (places[0] + len(places)) * size] as data:
            self._store.write_blocks(pages, data)

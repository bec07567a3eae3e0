"""Device memory for workers of the fake engine: a card is a dictionary, a copy goes from store to store."""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.errors import TransferError
from common.ids import BlockId
from engine.device.shared_memory import allocate_region
from engine.fake_pages import FakeKvStore
from engine.kv_store import DevicePeerPages, DeviceRegion
from worker.serving import RunningWorker


@dataclass
class Card:
    """One device, and what happened on it."""

    uuid: str = "card-0"
    readable: tuple["Card", ...] = ()
    """Other cards whose memory this one can read."""
    stores: dict[bytes, FakeKvStore] = field(default_factory=dict)
    num_mapped: int = 0
    num_closed: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeSharing:
    """A `DeviceSharing` of a fake store."""

    def __init__(self, card: Card, store: FakeKvStore) -> None:
        self.card = card
        self.store = store
        handle = f"handle-{len(card.stores)}".encode()
        card.stores[handle] = store
        self.region = DeviceRegion(
            handle=handle,
            offset_bytes=64,
            size_bytes=store.num_blocks * store.shape.block_bytes + 16,
            device_uuid=card.uuid,
            nonce=handle.ljust(16),
        )
        self.readable_devices = (card.uuid, *(each.uuid for each in card.readable))
        self._loop = asyncio.get_running_loop()

    def map_peer(self, region: DeviceRegion, num_blocks: int) -> DevicePeerPages:
        card = next(each for each in (self.card, *self.card.readable) if each.uuid == region.device_uuid)
        peer = card.stores.get(region.handle)
        if peer is None:
            raise TransferError("no such handle")
        expected = (region.handle.ljust(16), 64, num_blocks * peer.shape.block_bytes + 16, card.uuid)
        assert (region.nonce, region.offset_bytes, region.size_bytes, region.device_uuid) == expected
        self.card.num_mapped += 1
        return _Mapped(self, peer)

    def count_closed(self) -> None:
        self.card.num_closed += 1
        self._loop.call_soon_threadsafe(self.card.closed.set)


class FakeRing:
    """A `HostRing` of a fake store."""

    num_slots, blocks_per_slot = 2, 512

    def __init__(self, store: FakeKvStore) -> None:
        self._store = store
        self._memory, region = allocate_region(self.num_slots * self.blocks_per_slot * store.shape.block_bytes)
        assert region is not None
        self.region = region

    def fill(self, slot: int, block_ids: Seq[BlockId]) -> range:
        data, first = self._store.read_blocks(block_ids), slot * self.blocks_per_slot
        start = first * self._store.shape.block_bytes
        self._memory[start : start + data.nbytes] = data
        return range(first, first + len(block_ids))


def put_on_card(worker: RunningWorker, card: Card) -> None:
    """Move a worker's pages to device memory."""
    store = worker.runtime.executor.kv
    assert isinstance(store, FakeKvStore)
    store.device_sharing = FakeSharing(card, store)
    store.shared_region, store.host_ring = None, FakeRing(store)


class _Mapped:
    def __init__(self, sharing: FakeSharing, peer: FakeKvStore) -> None:
        self._sharing = sharing
        self._peer = peer
        self._is_open = True

    def copy_blocks(self, sources: Seq[int], targets: Seq[BlockId]) -> None:
        assert self._is_open
        if len(sources) != len(targets) or max(sources, default=0) >= self._peer.num_blocks:
            raise TransferError("no such block")
        self._sharing.store.write_blocks(targets, self._peer.read_blocks([BlockId(i) for i in sources]))

    def close(self) -> None:
        assert self._is_open
        self._is_open = False
        self._sharing.count_closed()

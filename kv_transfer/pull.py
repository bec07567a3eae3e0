"""The pulling side of a transfer. It writes only into pages that its own engine has reserved for it.

A pull is complete when every block in the manifest has arrived and been verified by its transport, and the manifest is
what this side expects. Only then may a sequence decode, and only then are blocks published in the cache. A handoff and
cached blocks of another worker are pulled alike; they differ in what is asked for (wanted.py).
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from common.clock import Clock
from common.errors import KvIncomplete, WorkerLost, from_rpc_error
from common.ids import BlockId, Epoch, WorkerId
from common.rpc import is_cancelled
from common.wire_names import TRANSPORT_NUMBERS
from engine.device.shared_memory import host_id
from engine.kv_store import KvStore
from engine.window_ids import NO_WINDOWS, WindowIds
from kv_transfer.handoff import HandoffManifest
from kv_transfer.transports.grpc_chunks import ChunkReceiver, GrpcChunks
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.transports.shared_memory import SharedMemory
from kv_transfer.transports.transport import PeerLife, PullTarget, Transport, to_end
from kv_transfer.wanted import Wanted, WantedBlocks
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """One pull: peer, blocks and our pages for them."""

    peer: WorkerId
    epoch: Epoch
    wanted: Wanted
    block_table: tuple[BlockId, ...]
    """Our own pages, one per wanted block."""
    first_block: int
    """Blocks before this one are here already."""
    windows: WindowIds = NO_WINDOWS
    """Our own window pages at the end of the wanted blocks."""
    ticket: str
    """Signed right to pull it."""

    def target(self) -> PullTarget:
        """Return the pages to fill: blocks and window pages behind those that are here."""
        num_blocks, num_windows = len(self.block_table), len(self.windows.ids)
        num_present = min(num_windows, max(0, self.first_block - self.windows.first_block))
        missing = {*range(self.first_block, num_blocks)}
        missing.update(range(num_blocks + num_present, num_blocks + num_windows))
        return PullTarget(self.block_table + self.windows.ids, missing)

    @property
    def life(self) -> PeerLife:
        """The life of the peer that holds the blocks."""
        return PeerLife(self.peer, self.epoch)


@dataclass(slots=True)
class Pulled:
    """A verified transfer."""

    manifest: HandoffManifest
    transport: int
    num_blocks: int
    """Blocks received; the manifest also counts those that were here before."""
    kv_bytes: int
    transfer_s: float
    exposed_s: float
    idle_s: float
    """Waiting for messages, after the first one with bytes."""


@dataclass(slots=True)
class _Times:
    """Arrival times of bytes."""

    clock: Clock
    first_s: float | None = None
    last_s: float | None = None
    idle_s: float = 0.0

    def stamp(self) -> None:
        """Record that bytes are being taken, or have been."""
        self.last_s = self.clock.monotonic()
        if self.first_s is None:
            self.first_s = self.last_s

    def count_idle(self) -> None:
        """Count the wait for a message that has come."""
        if self.last_s is not None:
            self.idle_s += self.clock.monotonic() - self.last_s


class KvPuller:
    """Pulls KV from peers over one stub per call. Event loop only; bytes are moved in the default executor.

    `on_bytes(transport, n)` counts bytes. `on_pull(peer, transport, n, seconds)` is called for pulls that waited for
    bytes only: a handoff that a prefill was still filling says nothing about the link.
    """

    def __init__(
        self,
        *,
        store: KvStore,
        transports: WorkerTransports,
        clock: Clock,
        on_bytes: Callable[[int, int], None],
        on_pull: Callable[[WorkerId, int, int, float], None],
    ) -> None:
        self._store = store
        self._transports = transports
        self._clock = clock
        self._on_bytes = on_bytes
        self._on_pull = on_pull
        self._watches: dict[PeerLife, asyncio.Task[None]] = {}

    async def pull(self, plan: PullPlan, channel: grpc.aio.Channel) -> Pulled:
        """Fill the plan's pages. Even when cancelled or failing, ends only after the last write into them.

        Raises KvIncomplete when bytes or manifest are wrong, WorkerLost when the connection breaks, and what the peer
        reports: HandoffGone, StaleEpoch or LayoutMismatch.
        """
        started_s = self._clock.monotonic()
        call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).FetchBlocks()
        try:
            opened = self._open(plan)
            offered = self._transports.offer(plan.life, opened)
            self._watch(plan.life, channel)
            await call.write(pb.FetchBlocksRequest(open=opened))
            pulled = await self._receive(plan, offered, call)
            self._note_pull(plan, pulled, self._clock.monotonic() - started_s)
            await call.write(pb.FetchBlocksRequest(ack=pb.AckFetch()))
            await call.done_writing()
            await call.read()  # until the serving side has released the lease
            return pulled
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:  # the call ended while we wrote to it
            raise KvIncomplete(f"the transfer of {plan.wanted} was cut off") from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise WorkerLost(f"the channel to {plan.peer} was closed") from None
        finally:
            call.cancel()

    def _watch(self, peer: PeerLife, channel: grpc.aio.Channel) -> None:
        """Have the transports forget a peer when its connection ends, for instance because its process died."""
        if peer not in self._watches:
            for life, watch in self._watches.items():
                if life.worker_id == peer.worker_id:  # an earlier one
                    watch.cancel()
            self._watches[peer] = asyncio.ensure_future(_disconnected(channel))
            self._watches[peer].add_done_callback(lambda _watch: self._forget(peer))

    def _forget(self, peer: PeerLife) -> None:
        del self._watches[peer]
        self._transports.forget(peer)

    def _open(self, plan: PullPlan) -> pb.OpenFetch:
        opened = pb.OpenFetch(
            epoch=plan.epoch,
            first_block=plan.first_block,
            layout_fingerprint=self._store.shape.fingerprint,
            host_id=host_id(),
            ticket=plan.ticket,
        )
        plan.wanted.ask(opened)
        return opened

    async def _receive(
        self,
        plan: PullPlan,
        offered: tuple[Transport, ...],
        call: "grpc.aio.StreamStreamCall[pb.FetchBlocksRequest, pb.FetchBlocksResponse]",
    ) -> Pulled:
        target = plan.target()
        num_window_pages = sum(1 for index in target.missing if index >= len(plan.block_table))
        times = _Times(self._clock)
        chunks = ChunkReceiver(self._store, target)
        """Takes what comes out of tiers, where the transport has other messages."""
        staged, num_staged = None, 0
        transport: Transport | None = None
        async with AsyncExitStack() as held:
            while True:
                message = await call.read()
                times.count_idle()
                if not isinstance(message, pb.FetchBlocksResponse):
                    raise KvIncomplete(f"the transfer of {plan.wanted} ended without a manifest")
                match message.WhichOneof("message"):
                    case "opened" if transport is None:
                        fetching = self._transports.fetch(plan.life, offered, message.opened, target)
                        transport, receiver = await held.enter_async_context(fetching)
                        lends, memory = message.opened.lends, message.opened.offloaded_memory
                    case kind if transport is not None and kind == transport.payload:
                        times.stamp()
                        await to_end(receiver.take, message)
                        times.stamp()
                        if lends:
                            await call.write(pb.FetchBlocksRequest(taken=pb.TakenBlocks()))
                    case "chunk" if transport is not None and plan.wanted.takes_offloaded:
                        await to_end(chunks.take, message)
                    case "staged" if transport is not None and plan.wanted.takes_offloaded:
                        if staged is None:
                            mapping = self._transports.staged(plan.life, memory, self._store, target)
                            staged = held.enter_context(mapping)
                        await to_end(staged.take, message)
                        num_staged += len(message.staged.block_ids)
                        await call.write(pb.FetchBlocksRequest(taken=pb.TakenBlocks()))
                    case "manifest" if transport is not None:
                        manifest = plan.wanted.verify(message.manifest, target.missing)
                        break
                    case other:
                        raise KvIncomplete(f"unexpected {other} in the transfer of {plan.wanted}")
        num_blocks = max(0, manifest.num_blocks - plan.first_block)
        shape = self._store.shape
        kv_bytes = num_blocks * shape.block_bytes + num_window_pages * shape.window_page_bytes
        offloaded = {GrpcChunks.name: chunks.num_blocks, SharedMemory.name: num_staged}
        for name, num_offloaded in offloaded.items():
            if num_offloaded:
                self._on_bytes(TRANSPORT_NUMBERS[name], num_offloaded * shape.block_bytes)
        self._on_bytes(transport.number, kv_bytes - sum(offloaded.values()) * shape.block_bytes)
        return Pulled(
            manifest=manifest,
            transport=transport.number,
            num_blocks=num_blocks,
            kv_bytes=kv_bytes,
            transfer_s=(times.last_s or 0.0) - (times.first_s or 0.0),
            exposed_s=message.manifest.age_s,
            idle_s=times.idle_s,
        )

    def _note_pull(self, plan: PullPlan, pulled: Pulled, elapsed_s: float) -> None:
        if not pulled.num_blocks:
            return
        if isinstance(plan.wanted, WantedBlocks):
            link_s = max(0.0, elapsed_s - max(0.0, pulled.manifest.offloaded_wait_s))
            self._on_pull(plan.peer, pulled.transport, pulled.kv_bytes, link_s)
        elif pulled.idle_s <= pulled.exposed_s:  # every wait was after the end of the prefill
            self._on_pull(plan.peer, pulled.transport, pulled.kv_bytes, max(pulled.exposed_s, pulled.transfer_s))


async def _disconnected(channel: grpc.aio.Channel) -> None:
    """Wait until a channel that is or becomes ready is so no longer. A closed channel is not."""
    was_ready = False
    while (state := channel.get_state()) is not grpc.ChannelConnectivity.SHUTDOWN:
        is_ready = state is grpc.ChannelConnectivity.READY
        if was_ready and not is_ready:
            return
        was_ready = is_ready
        await channel.wait_for_state_change(state)

"""The pulling side of a transfer. It writes only into pages that its own engine has reserved for it.

A pull is complete when every block that the manifest tells of has arrived, each piece's checksum matches, and the
manifest agrees with what this side expects. Only then may a sequence decode, and only then are blocks published in the
cache. A handoff and cached blocks of another worker are pulled alike; they differ in what is asked for (`wanted.py`).
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import grpc
import xxhash

from common.clock import Clock
from common.errors import KvIncomplete, WorkerLost, from_rpc_error
from common.ids import BlockId, Epoch, WorkerId
from common.rpc import is_cancelled
from engine.executor import KvStore
from engine.shared_memory import host_id
from kv_transfer.handoff import HandoffManifest
from kv_transfer.peer_memory import MappedPeer, PeerMemory
from kv_transfer.wanted import Wanted, WantedBlocks
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, worker_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """What to pull, from whom, and into which pages."""

    peer: WorkerId
    epoch: Epoch
    wanted: Wanted
    block_table: tuple[BlockId, ...]
    """Our own pages, one for each block that is wanted."""
    first_block: int
    """Blocks before this one are here already."""
    ticket: str
    """The right to pull it."""


@dataclass(slots=True)
class Pulled:
    """A verified transfer."""

    manifest: HandoffManifest
    transport: int
    num_blocks: int
    """Blocks received; the manifest counts those that were here before as well."""
    kv_bytes: int
    transfer_s: float
    exposed_s: float
    idle_s: float
    """Waited for messages behind the first one with bytes."""


@dataclass(slots=True)
class _Progress:
    """What has arrived so far."""

    missing: set[int]
    partial: dict[int, bytearray] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    first_s: float | None = None
    last_s: float | None = None
    idle_s: float = 0.0


class KvPuller:
    """Pulls KV from peers over one stub per call. Event loop only; bytes are moved in the default executor.

    `on_bytes(transport, n)` counts bytes. `on_pull(peer, transport, n, seconds)` hears how long a transfer took, where
    it waited for nothing but bytes: a handoff that a prefill was still filling says nothing about the link.
    """

    def __init__(
        self,
        *,
        store: KvStore,
        transports: tuple[int, ...],
        clock: Clock,
        on_bytes: Callable[[int, int], None],
        on_pull: Callable[[WorkerId, int, int, float], None],
    ) -> None:
        self._store = store
        self._peer_memory = PeerMemory(store=store, transports=transports)
        self._clock = clock
        self._on_bytes = on_bytes
        self._on_pull = on_pull

    async def pull(self, plan: PullPlan, channel: grpc.aio.Channel) -> Pulled:
        """Fill the plan's pages. When cancelled, or failing, returns only after the last write into them has ended.

        Raises KvIncomplete when bytes or manifest are wrong, HandoffGone, StaleEpoch, LayoutMismatch or WorkerLost as
        the peer or the connection tells.
        """
        started_s = self._clock.monotonic()
        call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).FetchBlocks()
        try:
            await call.write(pb.FetchBlocksRequest(open=self._open(plan)))
            pulled = await self._receive(plan, call)
            self._tell(plan, pulled, self._clock.monotonic() - started_s)
            await call.write(pb.FetchBlocksRequest(ack=pb.AckFetch()))
            await call.done_writing()
            await call.read()  # until the serving side has released the lease
            return pulled
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:  # the call ended while we wrote to it
            raise KvIncomplete(f"the transfer of {plan.wanted} broke off") from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise WorkerLost(f"the channel to {plan.peer} was closed") from None
        finally:
            call.cancel()

    def _open(self, plan: PullPlan) -> pb.OpenFetch:
        opened = pb.OpenFetch(
            epoch=plan.epoch,
            first_block=plan.first_block,
            layout_fingerprint=self._store.shape.fingerprint,
            transports=[
                worker_pb2.KvTransport.ValueType(transport)
                for transport in self._peer_memory.offers(plan.peer, plan.epoch)
            ],
            host_id=host_id(),
            device_uuid=self._peer_memory.device_uuid,
            ticket=plan.ticket,
        )
        plan.wanted.ask(opened)
        return opened

    async def _receive(
        self, plan: PullPlan, call: "grpc.aio.StreamStreamCall[pb.FetchBlocksRequest, pb.FetchBlocksResponse]"
    ) -> Pulled:
        progress = _Progress(missing=set(range(plan.first_block, len(plan.block_table))))
        transport = worker_pb2.KV_TRANSPORT_UNSPECIFIED
        peer: MappedPeer | None = None
        async with AsyncExitStack() as mapped:
            while True:
                message = await call.read()
                if progress.last_s is not None:
                    progress.idle_s += self._clock.monotonic() - progress.last_s
                if not isinstance(message, pb.FetchBlocksResponse):
                    raise KvIncomplete(f"the transfer of {plan.wanted} ended without a manifest")
                match message.WhichOneof("message"):
                    case "opened" if transport == worker_pb2.KV_TRANSPORT_UNSPECIFIED:
                        transport = message.opened.transport
                        if transport not in self._peer_memory.offers(plan.peer, plan.epoch):
                            raise KvIncomplete(f"{plan.peer} sends by transport {transport}, which was not offered")
                        memory = self._peer_memory.mapped(plan.peer, plan.epoch, message.opened)
                        peer = await mapped.enter_async_context(memory)
                    case "sealed" if peer is not None:
                        await self._to_end(self._copy_sealed, plan, progress, message.sealed, peer)
                    case "chunk" if transport == worker_pb2.KV_TRANSPORT_GRPC:
                        await self._to_end(self._store_chunk, plan, progress, message.chunk)
                    case "manifest":
                        manifest = plan.wanted.verify(message.manifest, progress.missing)
                        break
                    case other:
                        raise KvIncomplete(f"unexpected {other} in the transfer of {plan.wanted}")
        num_blocks = max(0, manifest.num_blocks - plan.first_block)
        kv_bytes = num_blocks * self._store.shape.block_bytes
        self._on_bytes(transport, kv_bytes)
        return Pulled(
            manifest=manifest,
            transport=transport,
            num_blocks=num_blocks,
            kv_bytes=kv_bytes,
            transfer_s=(progress.last_s or 0.0) - (progress.first_s or 0.0),
            exposed_s=message.manifest.age_s,
            idle_s=progress.idle_s,
        )

    def _tell(self, plan: PullPlan, pulled: Pulled, elapsed_s: float) -> None:
        if not pulled.num_blocks:
            return
        if isinstance(plan.wanted, WantedBlocks):
            self._on_pull(plan.peer, pulled.transport, pulled.kv_bytes, elapsed_s)
        elif pulled.idle_s <= pulled.exposed_s:  # whatever was waited for came after the end of the prefill
            self._on_pull(plan.peer, pulled.transport, pulled.kv_bytes, max(pulled.exposed_s, pulled.transfer_s))

    async def _to_end(self, work: Callable[..., None], *args: object) -> None:
        """Run `work` in the executor; a cancellation waits for it, since the pages may be freed right afterwards."""
        running = asyncio.get_running_loop().run_in_executor(None, work, *args)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():  # a call may be cancelled twice: by its caller, then by a stopping server
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise

    def _copy_sealed(self, plan: PullPlan, progress: _Progress, sealed: pb.SealedBlocks, peer: MappedPeer) -> None:
        """Copy pages of the peer into ours. Any thread."""
        self._stamp(progress)
        indexes = range(sealed.first_block, sealed.first_block + len(sealed.block_ids))
        if not progress.missing.issuperset(indexes):
            raise KvIncomplete(f"blocks {indexes} of {plan.wanted} were not asked for, or came twice")
        peer.copy(sealed, [plan.block_table[i] for i in indexes])
        progress.missing.difference_update(indexes)
        self._stamp(progress)

    def _store_chunk(self, plan: PullPlan, progress: _Progress, chunk: pb.BlockChunk) -> None:
        """Take a piece of a block; write the block when it is whole. Any thread."""
        self._stamp(progress)
        size = self._store.shape.block_bytes
        index, offset, data = chunk.block_index, chunk.offset, chunk.data
        if index not in progress.missing or offset != progress.filled.get(index, 0) or offset + len(data) > size:
            raise KvIncomplete(f"piece {offset} of block {index} of {plan.wanted} is out of order")
        if xxhash.xxh3_64_intdigest(data) != chunk.checksum:
            raise KvIncomplete(f"piece {offset} of block {index} of {plan.wanted} has a wrong checksum")
        buffer = progress.partial.setdefault(index, bytearray())
        buffer += data
        progress.filled[index] = len(buffer)
        if len(buffer) == size:
            self._store.write_blocks([plan.block_table[index]], memoryview(progress.partial.pop(index)))
            progress.missing.discard(index)
        self._stamp(progress)

    def _stamp(self, progress: _Progress) -> None:
        progress.last_s = self._clock.monotonic()
        if progress.first_s is None:
            progress.first_s = progress.last_s

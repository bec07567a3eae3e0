"""The pulling side of a transfer. It writes only into pages that its own engine has reserved for it.

A pull is complete when every block that was lacking has arrived, each piece's checksum matches, and the manifest agrees
with what this side expects. Only then may the sequence decode, and only then are its blocks published in the cache.
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
from common.ids import BlockHash, BlockId, Epoch, HandoffId, WorkerId
from common.rpc import is_cancelled
from engine.executor import KvStore
from engine.shared_memory import host_id
from kv_transfer.handoff import FirstToken, HandoffManifest
from kv_transfer.peer_memory import MappedPeer, PeerMemory
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, worker_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """What to pull, from whom, and into which pages."""

    peer: WorkerId
    handoff_id: HandoffId
    epoch: Epoch
    block_table: tuple[BlockId, ...]
    """The sequence's own pages."""
    first_block: int
    """Blocks before this one are here already."""
    num_tokens: int
    last_block_hash: BlockHash | None
    num_samples: int
    first_sample_index: int


@dataclass(slots=True)
class Pulled:
    """A verified transfer."""

    manifest: HandoffManifest
    transport: int
    num_blocks: int
    kv_bytes: int
    transfer_s: float
    exposed_s: float


@dataclass(slots=True)
class _Progress:
    """What has arrived so far."""

    missing: set[int]
    partial: dict[int, bytearray] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    first_s: float | None = None
    last_s: float | None = None


class KvPuller:
    """Pulls KV from peers over one stub per call. Event loop only; bytes are moved in the default executor."""

    def __init__(
        self, *, store: KvStore, transports: tuple[int, ...], clock: Clock, on_bytes: Callable[[int, int], None]
    ) -> None:
        self._store = store
        self._peer_memory = PeerMemory(store=store, transports=transports)
        self._clock = clock
        self._on_bytes = on_bytes

    async def pull(self, plan: PullPlan, channel: grpc.aio.Channel) -> Pulled:
        """Fill the plan's pages. When cancelled, returns only after the last write into them has ended.

        Raises KvIncomplete when bytes or manifest are wrong, HandoffGone, StaleEpoch, LayoutMismatch or WorkerLost as
        the peer or the connection tells.
        """
        call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).FetchBlocks()
        try:
            await call.write(pb.FetchBlocksRequest(open=self._open(plan)))
            pulled = await self._receive(plan, call)
            await call.write(pb.FetchBlocksRequest(ack=pb.AckFetch()))
            await call.done_writing()
            await call.read()  # until the serving side has released the lease
            return pulled
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:  # the call ended while we wrote to it
            raise KvIncomplete(f"the transfer of {plan.handoff_id} broke off") from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise WorkerLost(f"the channel to {plan.peer} was closed") from None
        finally:
            call.cancel()

    def _open(self, plan: PullPlan) -> pb.OpenFetch:
        return pb.OpenFetch(
            handoff_id=plan.handoff_id,
            epoch=plan.epoch,
            first_block=plan.first_block,
            layout_fingerprint=self._store.shape.fingerprint,
            transports=[
                worker_pb2.KvTransport.ValueType(transport)
                for transport in self._peer_memory.offers(plan.peer, plan.epoch)
            ],
            host_id=host_id(),
            device_uuid=self._peer_memory.device_uuid,
        )

    async def _receive(
        self, plan: PullPlan, call: "grpc.aio.StreamStreamCall[pb.FetchBlocksRequest, pb.FetchBlocksResponse]"
    ) -> Pulled:
        progress = _Progress(missing=set(range(plan.first_block, len(plan.block_table))))
        num_blocks = len(progress.missing)
        transport = worker_pb2.KV_TRANSPORT_UNSPECIFIED
        peer: MappedPeer | None = None
        async with AsyncExitStack() as mapped:
            while True:
                message = await call.read()
                if not isinstance(message, pb.FetchBlocksResponse):
                    raise KvIncomplete(f"the transfer of {plan.handoff_id} ended without a manifest")
                match message.WhichOneof("message"):
                    case "opened" if transport == worker_pb2.KV_TRANSPORT_UNSPECIFIED:
                        transport = message.opened.transport
                        memory = self._peer_memory.mapped(plan.peer, plan.epoch, message.opened)
                        peer = await mapped.enter_async_context(memory)
                    case "sealed" if peer is not None:
                        await self._to_end(self._copy_sealed, plan, progress, message.sealed, peer)
                    case "chunk":
                        await self._to_end(self._store_chunk, plan, progress, message.chunk)
                    case "manifest":
                        manifest = _verify(plan, progress, message.manifest)
                        break
                    case other:
                        raise KvIncomplete(f"unexpected {other} in the transfer of {plan.handoff_id}")
        kv_bytes = num_blocks * self._store.shape.block_bytes
        self._on_bytes(transport, kv_bytes)
        return Pulled(
            manifest=manifest,
            transport=transport,
            num_blocks=num_blocks,
            kv_bytes=kv_bytes,
            transfer_s=(progress.last_s or 0.0) - (progress.first_s or 0.0),
            exposed_s=message.manifest.age_s,
        )

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
            raise KvIncomplete(f"blocks {indexes} of {plan.handoff_id} were not asked for, or came twice")
        peer.copy(sealed, [plan.block_table[i] for i in indexes])
        progress.missing.difference_update(indexes)
        self._stamp(progress)

    def _store_chunk(self, plan: PullPlan, progress: _Progress, chunk: pb.BlockChunk) -> None:
        """Take a piece of a block; write the block when it is whole. Any thread."""
        self._stamp(progress)
        size = self._store.shape.block_bytes
        index, offset, data = chunk.block_index, chunk.offset, chunk.data
        if index not in progress.missing or offset != progress.filled.get(index, 0) or offset + len(data) > size:
            raise KvIncomplete(f"piece {offset} of block {index} of {plan.handoff_id} is out of order")
        if xxhash.xxh3_64_intdigest(data) != chunk.checksum:
            raise KvIncomplete(f"piece {offset} of block {index} of {plan.handoff_id} has a wrong checksum")
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


def _verify(plan: PullPlan, progress: _Progress, manifest: pb.Manifest) -> HandoffManifest:
    """Return the manifest when it and the received blocks are what the plan expects. Raises KvIncomplete."""
    if progress.missing:
        raise KvIncomplete(f"{len(progress.missing)} blocks of {plan.handoff_id} are missing")
    samples = [plan.first_sample_index + i for i in range(plan.num_samples)]
    expected = (plan.num_tokens, len(plan.block_table), plan.last_block_hash or b"", samples)
    first_samples = [token.sample_index for token in manifest.first_tokens]
    got = (manifest.num_tokens, manifest.num_blocks, manifest.last_block_hash, first_samples)
    if got != expected:
        raise KvIncomplete(f"manifest of {plan.handoff_id} says {got}; expected {expected}")
    return HandoffManifest(
        num_tokens=manifest.num_tokens,
        num_blocks=manifest.num_blocks,
        last_block_hash=plan.last_block_hash,
        first_tokens=tuple(
            FirstToken(sample_index=t.sample_index, token_id=t.token_id, finished=t.finished)
            for t in manifest.first_tokens
        ),
    )

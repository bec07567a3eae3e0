"""All transports, and those that one worker may use."""

from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from common.config import TransferConfig
from common.errors import KvIncomplete, LayoutMismatch
from common.ids import Epoch
from common.wire_names import TRANSPORT_NUMBERS
from engine.kv_store import KvStore
from kv_transfer.transports.cuda_ipc import CudaIpc
from kv_transfer.transports.grpc_chunks import GrpcChunks
from kv_transfer.transports.nixl import Nixl
from kv_transfer.transports.shared_memory import SharedMemory
from kv_transfer.transports.staging import StagedReceiver, mapped_staging
from kv_transfer.transports.transport import (
    PeerLife,
    PeerMemoryUnreachable,
    PullTarget,
    Receiver,
    Transport,
    is_same_host,
)
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import worker_pb2

TRANSPORTS: dict[str, type[Transport]] = {each.name: each for each in (CudaIpc, SharedMemory, Nixl, GrpcChunks)}
"""All transports by name, fastest first."""


class WorkerTransports:
    """The transports that one worker may use, preferred first. Event loop only.

    A transport that could not map a peer's memory is not used again in that peer's life: the next pull, which the
    router plans after the failed one, goes by the next transport.
    """

    def __init__(self, transports: Iterable[Transport]) -> None:
        self._transports = tuple(transports)
        self._unreachable: dict[tuple[str, str], Epoch] = {}
        """Epochs of peers whose memory a transport could not map."""

    @classmethod
    def configured(cls, config: TransferConfig, store: KvStore) -> "WorkerTransports":
        """Return the transports of a configuration, for the worker with these pages. Raises TransportUnusable."""
        return cls(TRANSPORTS[name](store, config) for name in config.transports)

    def offer(self, peer: PeerLife, opened: pb.OpenFetch) -> tuple[Transport, ...]:
        """Return the transports that a pull from a peer may use, and name them to the peer in `opened`."""
        offered = tuple(
            transport
            for transport in self._transports
            if self._unreachable.get((peer.worker_id, transport.name)) != peer.epoch and transport.offer(opened)
        )
        opened.transports.extend(worker_pb2.KvTransport.ValueType(transport.number) for transport in offered)
        return offered

    def choose(self, opened: pb.OpenFetch) -> Transport:
        """Return the puller's first choice that is allowed here, too, and reaches our pages. Raises LayoutMismatch."""
        allowed = {transport.number: transport for transport in self._transports}
        for number in opened.transports:
            transport = allowed.get(number)
            if transport is not None and transport.reaches(opened):
                return transport
        raise LayoutMismatch(
            f"cannot send KV: this worker has none of the transports that the puller offers, {list(opened.transports)}"
        )

    @asynccontextmanager
    async def fetch(
        self, peer: PeerLife, offered: Collection[Transport], opened: pb.FetchOpened, target: PullTarget
    ) -> AsyncIterator[tuple[Transport, Receiver]]:
        """Hold the transport that the peer chose for one transfer. Raises KvIncomplete if not offered or unmappable."""
        transport = next((each for each in offered if each.number == opened.transport), None)
        if transport is None:
            raise KvIncomplete(f"{peer.worker_id} sends by transport {opened.transport}, which was not offered")
        try:
            async with transport.fetch(peer, opened, target) as receiver:
                yield transport, receiver
        except PeerMemoryUnreachable as error:
            self._unreachable[peer.worker_id, transport.name] = peer.epoch
            raise KvIncomplete(f"the memory of {peer.worker_id} cannot be mapped: {error}") from error

    def can_stage(self, opened: pb.OpenFetch) -> bool:
        """Return whether the puller can map buffers of ours, as the settings of both let it."""
        allowed = any(transport.name == SharedMemory.name for transport in self._transports)
        return allowed and TRANSPORT_NUMBERS[SharedMemory.name] in opened.transports and is_same_host(opened)

    @contextmanager
    def staged(
        self, peer: PeerLife, memory: pb.SharedMemory, store: KvStore, target: PullTarget
    ) -> Iterator[StagedReceiver]:
        """Hold a peer's buffers, mapped. Raises KvIncomplete when that cannot be done."""
        try:
            with mapped_staging(memory, store, target) as receiver:
                yield receiver
        except PeerMemoryUnreachable as error:
            self._unreachable[peer.worker_id, SharedMemory.name] = peer.epoch
            raise KvIncomplete(f"the buffers of {peer.worker_id} cannot be mapped: {error}") from error

    def forget(self, peer: PeerLife) -> None:
        """Release what the transports keep for a peer: the connection to it has ended."""
        for transport in self._transports:
            transport.forget(peer)

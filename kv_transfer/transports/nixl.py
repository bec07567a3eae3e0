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
import ctypes
import importlib
import mmap
import threading
import time
import uuid
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from common.config import TransferConfig
from common.engines import NIXL_VERSION
from common.errors import KvCorrupt, TransferError
from common.ids import BlockId, WorkerId
from engine.kv_store import NONCE_BYTES, KvStore, SharedRegion, check_ids
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
_POLL_S = 100e-6
_MEMORY = "DRAM"

Spans = npt.NDArray[np.uint64]
"""Spans of memory as NIXL takes them, [number, 3]: address, bytes, device."""


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
        if store.shape.windowed is not None:
            raise TransportUnusable(
                "cannot use nixl: layers with a window have pages of their own, which it does not move; leave it out"
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
                first_block, block_ids, checksums_of(self._store.read_blocks(block_ids), self._store.shape.block_bytes)
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
        self._read(_spans([scratch.address], NONCE_BYTES), _spans([end - NONCE_BYTES], NONCE_BYTES))
        if len(memory.nonce) != NONCE_BYTES or scratch.memory[:NONCE_BYTES] != memory.nonce:
            raise TransferError("the memory at its address is not the peer's KV memory")

    def copy(self, blocks: pb.SealedBlocks, pages: Seq[BlockId]) -> None:
        """See `SealedReceiver`."""
        shape, num_read = self._store.shape, len(pages)
        check_ids(blocks.block_ids, self._memory.num_blocks)
        num_bytes = num_read * shape.block_bytes + NONCE_BYTES
        scratch = self._room(num_bytes)
        piece_bytes = shape.block_bytes // self._region.num_pieces
        pieces = np.arange(self._region.num_pieces, dtype=np.uint64)[:, None]
        sources = pieces * self._memory.num_blocks + np.array(blocks.block_ids, dtype=np.uint64)
        targets = np.arange(self._region.num_pieces * num_read, dtype=np.uint64)
        self._read(
            _spans(targets * piece_bytes + scratch.address, piece_bytes),
            _spans(sources.reshape(-1) * piece_bytes + self._memory.address, piece_bytes),
        )
        # The pieces read lie as in a region of so many blocks.
        data = self._store.map_peer(memoryview(scratch.memory)[:num_bytes], num_read).read_blocks(range(num_read))
        if checksums_of(data, shape.block_bytes) != list(blocks.checksums):
            raise KvCorrupt("a checksum is wrong, or missing")
        self._store.write_blocks(pages, data)

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


class Registered:
    """Memory that an agent may read and write; its address is fixed."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self._held = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.address = ctypes.addressof(self._held)
        self.handle: Any = None


class ReadGivenUp(TransferError):
    """A read missed its time limit and cannot be aborted: it may still write into its target at any time."""


class Agent:
    """The NIXL agent of one worker. Any thread: calls into it take turns."""

    def __init__(self, *, read_timeout_s: float) -> None:
        """Raises TransportUnusable."""
        try:
            api = importlib.import_module("nixl._api")
            self._agent: Any = api.nixl_agent(f"kvrelay-{uuid.uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:
            raise TransportUnusable(
                f"cannot use nixl: {error or type(error).__name__}; `pip install nixl=={NIXL_VERSION}` in this worker's"
                " environment, or leave it out"
            ) from error
        self._read_timeout_s = read_timeout_s
        self._lock = threading.RLock()
        self._peers: dict[WorkerId, tuple[bytes, Any]] = {}
        """Metadata and name of each peer's agent, of its latest life."""
        self._given_up: list[Any] = []
        """Reads that have not ended, and their targets."""

    def metadata(self) -> bytes:
        """Return what a peer needs to read the memory registered so far."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def register(self, memory: Registered) -> None:
        """Register memory, so that the agent and its peers may read and write it. Raises TransferError."""
        spans = [(memory.address, len(memory.memory), 0, "")]
        memory.handle = self._call(self._agent.register_memory, spans, _MEMORY)

    def unregister(self, memory: Registered) -> None:
        """Revoke the access that `register` gave. Raises TransferError."""
        self._call(self._agent.deregister_memory, memory.handle)

    def add(self, peer: WorkerId, metadata: bytes) -> None:
        """Connect to a peer by its metadata, replacing an older connection. Raises TransferError."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and known[0] == metadata:
                return
            self.forget(peer)
            self._peers[peer] = metadata, self._call(self._agent.add_remote_agent, metadata)

    def forget(self, peer: WorkerId) -> None:
        """Close the connection to a peer, if there is one."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                self._call(self._agent.remove_remote_agent, known[1])

    def read(self, peer: WorkerId, targets: Spans, sources: Spans) -> None:
        """Copy the peer's spans over our own, and wait. Raises TransferError; the peer is then forgotten."""
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"the connection to {peer} was lost")
        try:
            self._read(known[1], targets, sources)
        except TransferError:
            self.forget(peer)
            raise

    def _read(self, name: str, targets: Spans, sources: Spans) -> None:
        own = self._call(self._agent.get_xfer_descs, targets, _MEMORY)
        theirs = self._call(self._agent.get_xfer_descs, sources, _MEMORY)
        handle = self._call(self._agent.initialize_xfer, "READ", own, theirs, name)
        deadline_s = time.monotonic() + self._read_timeout_s
        try:
            state = self._call(self._agent.transfer, handle)
            while state == "PROC" and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                state = self._call(self._agent.check_xfer_state, handle)
        finally:
            self._release(handle)
        if state != "DONE":
            raise TransferError("the read failed" if state == "ERR" else f"the read took {self._read_timeout_s} s")

    def _release(self, handle: Any) -> None:
        """Free a read; one that is under way is ended. Raises ReadGivenUp when it cannot be ended."""
        try:
            self._call(self._agent.release_xfer_handle, handle)
        except TransferError as error:
            self._given_up.append(handle)
            raise ReadGivenUp(f"a read cannot be ended: {error}") from error

    def _call(self, method: Any, *args: Any) -> Any:
        """Call the agent. Raises TransferError for whatever it raises."""
        with self._lock:
            try:
                return method(*args)
            except Exception as error:
                raise TransferError(f"NIXL: {error or type(error).__name__}") from error


def _spans(addresses: Any, num_bytes: int) -> Spans:
    """Return spans of equal size."""
    spans = np.zeros((len(addresses), 3), dtype=np.uint64)
    spans[:, 0], spans[:, 1] = addresses, num_bytes
    return spans

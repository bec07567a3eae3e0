"""The NIXL agent of a worker: memory that it registers, peers that it knows, and reads of their memory."""

import ctypes
import importlib
import mmap
import threading
import time
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt

from common.engines import NIXL_VERSION
from common.errors import TransferError
from common.ids import WorkerId
from kv_transfer.transports.transport import TransportUnusable

_POLL_S = 100e-6
_MEMORY = "DRAM"

Spans = npt.NDArray[np.uint64]
"""Spans of memory as NIXL takes them, [number, 3]: address, bytes, device."""


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


def spans_of(addresses: Any, num_bytes: int) -> Spans:
    """Return spans of equal size."""
    spans = np.zeros((len(addresses), 3), dtype=np.uint64)
    spans[:, 0], spans[:, 1] = addresses, num_bytes
    return spans

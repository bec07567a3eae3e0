"""A worker's KV plane without an engine: every handoff that a puller names is there, complete, with all pages.

`python -m benchmarks.tls_cost.kv_source NUM_BLOCKS` gets its certificate on stdin and prints a ready line.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import grpc
import numpy as np
import uvloop

from benchmarks.trust import HOST, enrol_child
from common.clock import SystemClock
from common.config import TransferConfig
from common.ids import BlockId, Epoch, HandoffId, WorkerId
from common.process import Ready, die_with_parent, ready_line
from common.rpc_server import start_server
from common.trust.access import Audience
from common.trust.guard import Guard
from engine.kv_store import DeviceSharing, KvShape, PeerPages, SharedRegion
from engine.thread import EngineDriver
from kv_transfer.handoff import FirstToken, Handoff, HandoffManifest, HandoffTable
from kv_transfer.serve import KvTransferService, ServeSettings, check_by
from kv_transfer.transports.registry import WorkerTransports
from kvrelay.v1 import kv_transfer_pb2_grpc

SHAPE = KvShape(
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
    dtype="bfloat16",
    row_bytes=128,
    fingerprint="benchmark-pages",
)
EPOCH = Epoch(1)
_LEASE_S = 60.0


class Pages:
    """A KvStore in ordinary memory, shaped like SmolLM2-135M's; both ends of a transfer have one."""

    def __init__(self, num_blocks: int) -> None:
        self.shape = SHAPE
        self.num_blocks = num_blocks
        self.shared_region: SharedRegion | None = None
        self.device_sharing: DeviceSharing | None = None
        self._bytes = np.random.default_rng(1).integers(0, 256, (num_blocks, SHAPE.block_bytes), dtype=np.uint8)

    def read_blocks(self, block_ids: Sequence[BlockId]) -> memoryview:
        """Return a copy of the blocks' bytes."""
        return self._bytes[list(block_ids)].reshape(-1).data

    def write_blocks(self, block_ids: Sequence[BlockId], data: memoryview) -> None:
        """Fill blocks from bytes."""
        self._bytes[list(block_ids)] = np.frombuffer(data, dtype=np.uint8).reshape(len(block_ids), -1)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block."""
        self._bytes[target] = self._bytes[source]

    def map_peer(self, region: memoryview, num_blocks: int) -> PeerPages:
        """Refuse: bytes are to travel."""
        raise AssertionError("pages are not shared")


class FullTable(HandoffTable):
    """Has every handoff."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(block_size=SHAPE.block_size, lease_ttl_s=_LEASE_S, clock=SystemClock())
        self._blocks = tuple(map(BlockId, range(num_blocks)))

    def attach_puller(self, handoff_id: HandoffId) -> Handoff:
        """Return the handoff, complete."""
        handoff = self.begin(handoff_id, lambda: None)
        super().attach_puller(handoff_id)
        num_blocks, num_tokens = len(self._blocks), len(self._blocks) * SHAPE.block_size
        self.progress(handoff, self._blocks, num_tokens)
        token = FirstToken(sample_index=0, token_id=1, finished=False)
        self.complete(
            handoff,
            HandoffManifest(num_tokens=num_tokens, num_blocks=num_blocks, last_block_hash=None, first_tokens=(token,)),
        )
        return handoff


class _NoEngine:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"there is no engine to {name}")


async def _serve(num_blocks: int) -> None:
    credentials = await enrol_child()
    pages = Pages(num_blocks)
    service = KvTransferService(
        table=FullTable(num_blocks),
        engine=cast(EngineDriver, _NoEngine()),
        store=pages,
        settings=ServeSettings(
            worker_id=WorkerId(credentials.identity.name),
            check_pull=check_by(credentials),
            epoch=lambda: EPOCH,
            transports=WorkerTransports.configured(TransferConfig(transports=("grpc",)), pages),
            lease_ttl_s=_LEASE_S,
        ),
        track=nullcontext,
        on_bytes=lambda _transport, _count: None,
    )

    def add(server: grpc.aio.Server) -> list[str]:
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(service, server)
        return []

    server = await start_server(add, host=HOST, port=0, guard=Guard(credentials, Audience.INSIDERS))
    address = f"{HOST}:{server.port}"
    print(ready_line(Ready(address=address, admin_address=address, metrics_port=0, pid=os.getpid())), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(_serve(int(sys.argv[1])))

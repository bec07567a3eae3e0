"""A peer that plays a script, and a puller that pulls from it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import xxhash

from common.clock import SystemClock
from common.config import TransferConfig
from common.ids import BlockId, Epoch, HandoffId, WorkerId
from engine.fake_pages import FakeKvStore
from kv_transfer.pull import KvPuller, PullPlan
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.wanted import WantedHandoff
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, worker_pb2
from tests.trust import as_worker
from tests.worker.scripted_source import serve_blocks

BLOCK = bytes(range(32))  # one block of the fake: 4 tokens of 8 bytes


def chunk(index: int, *, offset: int = 0, data: bytes = BLOCK, checksum: int | None = None) -> pb.FetchBlocksResponse:
    checksum = xxhash.xxh3_64_intdigest(data) if checksum is None else checksum
    return pb.FetchBlocksResponse(chunk=pb.BlockChunk(block_index=index, offset=offset, data=data, checksum=checksum))


def manifest(**changes: Any) -> pb.FetchBlocksResponse:
    fields: dict[str, Any] = {
        "num_tokens": 6,
        "num_blocks": 2,
        "last_block_hash": b"",
        "first_tokens": [pb.ManifestToken(sample_index=0, token_id=7)],
    }
    return pb.FetchBlocksResponse(manifest=pb.Manifest(**(fields | changes)))


OPENED = pb.FetchBlocksResponse(opened=pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_GRPC))


class Peer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Plays a script, and remembers whether it got an acknowledgement."""

    def __init__(self, script: list[pb.FetchBlocksResponse], end: Callable[[Any], Any] | None = None) -> None:
        self.script = script
        self.end = end
        self.acked = False
        self.offered: list[list[int]] = []

    async def DescribePages(self, request: Any, context: Any) -> pb.DescribePagesResponse:
        return pb.DescribePagesResponse()

    async def FetchBlocks(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        opened = await anext(request_iterator)
        assert opened.WhichOneof("message") == "open"
        self.offered.append(list(opened.open.transports))
        for message in self.script:
            await context.write(message)
            if message.HasField("staged"):
                await anext(request_iterator, None)
        if self.end is not None:
            await self.end(context)
        elif self.script[-1].WhichOneof("message") == "manifest":
            last: Any = await anext(request_iterator, None)
            self.acked = last is not None and last.WhichOneof("message") == "ack"


@asynccontextmanager
async def pulling(peer: Peer) -> AsyncIterator[tuple[KvPuller, FakeKvStore, grpc.aio.Channel]]:
    server = await serve_blocks(peer, "prefill-0")
    store = FakeKvStore(num_blocks=8, block_size=4)
    puller = KvPuller(
        store=store,
        transports=WorkerTransports.configured(TransferConfig(chunk_bytes=4096), store),
        clock=SystemClock(),
        on_bytes=lambda _transport, _count: None,
        on_pull=lambda *_timed: None,
    )
    channel = as_worker(f"127.0.0.1:{server.port}", "decode-0")
    try:
        yield puller, store, channel
    finally:
        await channel.close()
        await server.stop(0)


HANDOFF = WantedHandoff(
    handoff_id=HandoffId("ho-1"),
    num_tokens=6,
    num_blocks=2,
    last_block_hash=None,
    num_samples=1,
    first_sample_index=0,
)


def plan(**changes: Any) -> PullPlan:
    """Return a plan for a handoff of two blocks."""
    fields: dict[str, Any] = {"peer": WorkerId("prefill-0"), "epoch": Epoch(1), "ticket": ""}
    fields |= {"wanted": HANDOFF, "block_table": (BlockId(5), BlockId(2)), "first_block": 0}
    return PullPlan(**(fields | changes))

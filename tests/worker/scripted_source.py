"""A worker to pull from that does what a test says: it sends some blocks, then waits, breaks off or lies."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import xxhash

from common.rpc_server import Server, start_server
from engine.fake_model import token_kv
from engine.request import EngineRequest
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, sequence_pb2, worker_pb2
from tests.builders import BLOCK_SIZE
from tests.trust import worker_guard

Script = Callable[["ScriptedSource", pb.OpenFetch, Any], Coroutine[Any, Any, None]]


class ScriptedSource(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Holds the blocks of one request, in a script's hands."""

    def __init__(self, request: EngineRequest, script: Script) -> None:
        self.request = request
        self.script = script
        self.asked = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when the stream has ended: a real source would have unpinned everything."""
        self.num_asked = 0
        self.server: Server | None = None

    async def FetchBlocks(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        opened = (await anext(request_iterator)).open
        self.num_asked += 1
        try:
            await context.write(pb.FetchBlocksResponse(opened=pb.FetchOpened(transport=worker_pb2.KV_TRANSPORT_GRPC)))
            await self.script(self, opened, context)
            self.asked.set()
            await anext(request_iterator, None)
        finally:
            self.asked.set()
            self.ended.set()

    def where(self, num_blocks: int) -> sequence_pb2.KvSource:
        """Return the message that names this source."""
        assert self.server is not None
        return sequence_pb2.KvSource(
            worker_id="scripted", address=f"127.0.0.1:{self.server.port}", epoch=1, num_blocks=num_blocks
        )

    async def die(self) -> None:
        """Break every stream and stop listening."""
        server, self.server = self.server, None
        if server is not None:
            await server.grpc_server.stop(None)

    async def send(self, context: Any, first: int, stop: int) -> None:
        """Send the right content of blocks [first, stop)."""
        for index in range(first, stop):
            positions = range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            values = [token_kv(self.request.prompt_token_ids[p], p) for p in positions]
            data = np.array(values, dtype="<u8").tobytes()
            chunk = pb.BlockChunk(block_index=index, data=data, checksum=xxhash.xxh3_64_intdigest(data))
            await context.write(pb.FetchBlocksResponse(chunk=chunk))

    async def send_manifest(self, context: Any, num_blocks: int) -> None:
        """Tell of so many blocks."""
        manifest = pb.Manifest(
            num_tokens=num_blocks * BLOCK_SIZE,
            num_blocks=num_blocks,
            last_block_hash=self.request.block_hashes[num_blocks - 1],
        )
        await context.write(pb.FetchBlocksResponse(manifest=manifest))


@asynccontextmanager
async def scripted_source(request: EngineRequest, script: Script) -> AsyncIterator[ScriptedSource]:
    """Serve a source for the duration of the block."""
    source = ScriptedSource(request, script)  # type: ignore[abstract]  # DescribePages is not called
    source.server = await serve_blocks(source, "scripted")
    try:
        yield source
    finally:
        await source.die()


async def serve_blocks(source: kv_transfer_pb2_grpc.KvTransferServiceServicer, name: str) -> Server:
    """Serve the blocks of a made-up worker on a free port."""

    def add(server: grpc.aio.Server) -> list[str]:
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(source, server)
        return []

    return await start_server(add, host="127.0.0.1", port=0, guard=worker_guard(name))

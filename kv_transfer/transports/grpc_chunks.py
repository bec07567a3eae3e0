"""Blocks in checksummed chunks on the gRPC stream: reaches everywhere."""

from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager

import xxhash

from common.errors import KvCorrupt
from common.ids import BlockId
from engine.kv_store import KvStore, page_bytes_of
from kv_transfer.transports.transport import PeerLife, PullTarget, Receiver, Transport
from kvrelay.v1 import kv_transfer_pb2 as pb


class GrpcChunks(Transport):
    """See the module."""

    name = "grpc"
    payload = "chunk"

    def seal(self, first_block: int, block_ids: Seq[BlockId]) -> list[pb.FetchBlocksResponse]:
        """See `Transport`."""
        data = self._store.read_blocks(block_ids)
        size, most = page_bytes_of(self._store, block_ids), self._config.chunk_bytes
        messages: list[pb.FetchBlocksResponse] = []
        for i in range(len(block_ids)):
            messages += chunks_of(first_block + i, data[i * size : (i + 1) * size], max_bytes=most)
        return messages

    @asynccontextmanager
    async def fetch(self, peer: PeerLife, opened: pb.FetchOpened, target: PullTarget) -> AsyncIterator[Receiver]:
        """See `Transport`."""
        yield ChunkReceiver(self._store, target)


def chunks_of(block_index: int, data: memoryview, *, max_bytes: int) -> list[pb.FetchBlocksResponse]:
    """Return the messages that bring one block. Any thread."""
    messages = []
    for offset in range(0, len(data), max_bytes):
        piece = bytes(data[offset : offset + max_bytes])
        checksum = xxhash.xxh3_64_intdigest(piece)
        chunk = pb.BlockChunk(block_index=block_index, offset=offset, data=piece, checksum=checksum)
        messages.append(pb.FetchBlocksResponse(chunk=chunk))
    return messages


class ChunkReceiver:
    """Gathers the pieces of each block, and writes the block when it is whole."""

    def __init__(self, store: KvStore, target: PullTarget) -> None:
        self.num_blocks = 0
        """Blocks that are whole."""
        self._store = store
        self._target = target
        self._partial: dict[int, bytearray] = {}

    def take(self, message: pb.FetchBlocksResponse) -> None:
        """See `Receiver`."""
        chunk = message.chunk
        index, offset, data = chunk.block_index, chunk.offset, chunk.data
        pages = self._target.pages_of(range(index, index + 1))
        size = page_bytes_of(self._store, pages)
        buffer = self._partial.setdefault(index, bytearray())
        if offset != len(buffer) or offset + len(data) > size:
            raise KvCorrupt(f"piece {offset} of block {index} is out of order")
        if xxhash.xxh3_64_intdigest(data) != chunk.checksum:
            raise KvCorrupt(f"piece {offset} of block {index} has a wrong checksum")
        buffer += data
        if len(buffer) == size:
            self._store.write_blocks(pages, memoryview(self._partial.pop(index)))
            self._target.missing.discard(index)
            self.num_blocks += 1

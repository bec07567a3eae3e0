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
            for offset in range(0, size, most):
                piece = bytes(data[i * size + offset : i * size + min(offset + most, size)])
                chunk = pb.BlockChunk(
                    block_index=first_block + i, offset=offset, data=piece, checksum=xxhash.xxh3_64_intdigest(piece)
                )
                messages.append(pb.FetchBlocksResponse(chunk=chunk))
        return messages

    @asynccontextmanager
    async def fetch(self, peer: PeerLife, opened: pb.FetchOpened, target: PullTarget) -> AsyncIterator[Receiver]:
        """See `Transport`."""
        yield _Assembler(self._store, target)


class _Assembler:
    """Gathers the pieces of each block, and writes the block when it is whole."""

    def __init__(self, store: KvStore, target: PullTarget) -> None:
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

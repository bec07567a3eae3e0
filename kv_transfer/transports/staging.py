"""Buffers of a peer on this host, out of which blocks that are in none of its pages are copied.

The peer fills a buffer, names the blocks in it with their checksums, and uses it again once it has its answer.
"""

import mmap
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from common.errors import KvCorrupt, TransferError
from common.ids import BlockId
from engine.device.shared_memory import map_peer_region
from engine.kv_store import NONCE_BYTES, KvStore, check_ids
from kv_transfer.transports.transport import PeerMemoryUnreachable, PullTarget, SealedReceiver, checksums_of
from kvrelay.v1 import kv_transfer_pb2 as pb


class StagedReceiver(SealedReceiver):
    """Copies blocks out of a peer's buffers, verifies the copy, and fills the pages."""

    def __init__(self, region: mmap.mmap, store: KvStore, target: PullTarget) -> None:
        super().__init__(target)
        self._region = region
        self._store = store

    def copy(self, blocks: pb.SealedBlocks, pages: Seq[BlockId]) -> None:
        """See `SealedReceiver`."""
        places, size = blocks.block_ids, self._store.shape.block_bytes
        if not places or list(places) != list(range(places[0], places[0] + len(places))):
            raise KvCorrupt("the blocks of a buffer do not follow each other, or there are none")
        check_ids(places, (len(self._region) - NONCE_BYTES) // size)
        data = memoryview(self._region[places[0] * size : (places[0] + len(places)) * size])
        if checksums_of(data, size) != list(blocks.checksums):
            raise KvCorrupt("a checksum is wrong, or missing")
        self._store.write_blocks(pages, data)


@contextmanager
def mapped_staging(memory: pb.SharedMemory, store: KvStore, target: PullTarget) -> Iterator[StagedReceiver]:
    """Map a peer's buffers during the block. Raises PeerMemoryUnreachable."""
    try:
        store.shape.check_region(memory.size_bytes, memory.num_blocks)
        region = map_peer_region(pid=memory.pid, fd=memory.fd, size_bytes=memory.size_bytes, nonce=memory.nonce)
    except (OSError, TransferError) as error:
        raise PeerMemoryUnreachable(str(error)) from error
    with region:
        yield StagedReceiver(region, store, target)

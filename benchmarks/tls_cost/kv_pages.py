"""Pages in ordinary memory, shaped like SmolLM2-135M's, without an engine: both ends of a transfer have them."""

from collections.abc import Sequence

import numpy as np

from common.ids import BlockId
from engine.executor import DeviceSharing, KvShape, PeerPages, SharedRegion

SHAPE = KvShape(
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
    dtype="bfloat16",
    bytes_per_element=2,
    fingerprint="benchmark-pages",
)


class Pages:
    """A KvStore."""

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

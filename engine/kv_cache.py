"""The pages' bytes: one storage for all layers, in host memory that peers can map, or on a device.

In memory a layer's keys lie together, [num_layers, 2, num_blocks, page], because attention reads a layer at a time. On
the wire a block's bytes do, [num_layers, 2, page]. A page is one layer's keys, or values, of a block: plainly
[block_size, num_kv_heads, head_dim], or codes (`engine.kv_format`) with their scales behind them,

    keys    [block_size / 16, num_kv_heads, row_bytes / 4, 16 tokens, 4 bytes]
    values  [block_size / 16, num_kv_heads, 4, row_bytes, 4 tokens]
    scales  [block_size / 16, num_kv_heads, row_scales, 16 tokens], bfloat16

in which one instruction of a CPU multiplies sixteen times four codes, without moving any. So scales travel, and are
cached, copied and evicted, with their block, by code that sees nothing but bytes.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.ids import BlockId
from engine.cuda.ipc import share_pages
from engine.cuda.kv_copy import DevicePages
from engine.kv_format import KvDtype, format_named, kv_format
from engine.kv_store import NONCE_BYTES, DeviceSharing, KvShape, SharedRegion, check_ids
from engine.memory import NoRoomForPages
from engine.model.config import DecoderConfig, TransformersConfig
from engine.shared_memory import allocate_region

Bytes = npt.NDArray[np.uint8]


def num_blocks_for_budget(kv_bytes: int, shape: KvShape) -> int:
    """Return how many pages fit in `kv_bytes`. Raises NoRoomForPages when not even one does."""
    num_blocks = kv_bytes // shape.block_bytes
    if num_blocks < 1:
        raise NoRoomForPages(
            f"{kv_bytes} bytes of KV memory hold no page of {shape.block_bytes} bytes: raise kv_memory_gib"
        )
    return num_blocks


def kv_shape(
    config: DecoderConfig | TransformersConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    fingerprint: str,
    kv_dtype: KvDtype = "auto",
) -> KvShape:
    """Return the shape of the pages of a model that computes in `dtype`."""
    pages = kv_format(kv_dtype, dtype)
    return KvShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=pages.name,
        row_bytes=pages.row_bytes(config.head_dim),
        fingerprint=fingerprint,
    )


class HostPages:
    """Pages in host memory, our own or mapped, as bytes. Any thread, for blocks that the caller holds."""

    def __init__(self, region: memoryview, num_blocks: int, shape: KvShape) -> None:
        shape.check_region(region.nbytes, num_blocks)
        self._shape = shape
        pages = np.frombuffer(region, dtype=np.uint8)[:-NONCE_BYTES]
        # [num_layers * 2, num_blocks, bytes of one block's keys or values in one layer]
        self._pages: Bytes = pages.reshape(2 * shape.num_layers, num_blocks, -1)

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the blocks' bytes, [len(block_ids) * block_bytes]. Raises LayoutMismatch for a bad id."""
        check_ids(block_ids, self._pages.shape[1])
        blocks = np.empty((len(block_ids), *self._pages[:, 0].shape), dtype=np.uint8)
        for target, block_id in zip(blocks, block_ids, strict=True):
            target[:] = self._pages[:, block_id]
        return blocks.reshape(-1).data

    def write_blocks(self, block_ids: Seq[int], data: memoryview) -> None:
        """Fill blocks from bytes laid out as `read_blocks` returns them. Raises LayoutMismatch for a bad id or size."""
        check_ids(block_ids, self._pages.shape[1])
        self._shape.check_data(data, len(block_ids))
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(len(block_ids), *self._pages[:, 0].shape)
        for source, block_id in zip(blocks, block_ids, strict=True):
            self._pages[:, block_id] = source


class TorchKvStore:
    """Pages of one engine as tensors; a `KvStore`.

    `layers[i]` is (keys, values) of layer i, views [num_blocks, block_size, num_kv_heads, head_dim] of the one storage.
    Pages of codes: [num_blocks, page] bytes; `engine.ops.torch_pages` finds codes and scales in them. In host memory
    pages can be mapped by other processes of the host, in device memory by those on the same card.
    """

    def __init__(self, shape: KvShape, num_blocks: int, *, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.shared_region: SharedRegion | None = None
        self.device_sharing: DeviceSharing | None = None
        self.kv_format = format_named(shape.dtype)
        sizes = (shape.num_layers, 2, num_blocks, -1)
        kv_bytes = num_blocks * shape.block_bytes
        self._bytes: HostPages | DevicePages
        if device.type == "cpu":
            memory, self.shared_region = allocate_region(kv_bytes, num_pieces=2 * shape.num_layers)
            self._bytes = HostPages(memoryview(memory), num_blocks, shape)
            storage = torch.frombuffer(memory, dtype=torch.uint8)
            self._pages = storage[:kv_bytes].view(sizes)
        else:
            storage = torch.zeros(kv_bytes + NONCE_BYTES, dtype=torch.uint8, device=device)
            self._pages = storage[:kv_bytes].view(sizes)
            self._bytes = DevicePages(self._pages, shape)
            self.device_sharing = share_pages(storage, self._bytes)
        pages = self._pages
        if not self.kv_format.has_codes:
            pages = pages.view(self.kv_format.dtype).view(
                *sizes[:3], shape.block_size, shape.num_kv_heads, shape.head_dim
            )
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple((layer[0], layer[1]) for layer in pages)

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """Return a copy of the blocks' bytes, [len(block_ids) * block_bytes]. Raises LayoutMismatch for a bad id."""
        return self._bytes.read_blocks(block_ids)

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Fill blocks from bytes laid out as `read_blocks` returns them. Raises LayoutMismatch for a bad id or size."""
        self._bytes.write_blocks(block_ids, data)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block inside the pool, in order with the steps. Engine thread only."""
        self._pages[:, :, target] = self._pages[:, :, source]

    def clear_blocks(self, block_ids: Seq[BlockId]) -> None:
        """Zero blocks, in order with the steps. Engine thread only."""
        self._pages.index_fill_(2, self._index(block_ids), 0)

    def map_peer(self, region: memoryview, num_blocks: int) -> HostPages:
        """Interpret another process's region as pages of this shape. Raises LayoutMismatch when its size is wrong."""
        return HostPages(region, num_blocks, self.shape)

    def _index(self, block_ids: Seq[BlockId]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._pages.device)

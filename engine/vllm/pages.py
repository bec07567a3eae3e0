"""Pages that vLLM's attention reads and writes, in one region of host memory for all ranks, and their form on the wire.

In memory the region is [num_layers, num_blocks, num_kv_heads, head page]; a rank's part is a strided view of its own
heads, so the bytes are the same at any tensor-parallel size. A head page holds keys and values of one head of a block,
2 * block_size * head_dim elements in an order of the backend's own: a CPU's kernels keep keys transposed. The order is
not written down here but learned at start: a rank writes numbered elements with the backend's own operation and looks
where they land.

On the wire a block is [num_layers, 2, block_size, num_kv_heads, head_dim], as our own engine has it.
"""

import hashlib
import mmap
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.ids import BlockId
from engine.kv_store import NONCE_BYTES, DeviceSharing, KvShape, SharedRegion, check_ids
from engine.shared_memory import allocate_region

Places = npt.NDArray[np.intp]
_DIGIT = 256  # integers below it are exact in every dtype of pages


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOrder:
    """Order of the elements in a head page."""

    elements: tuple[int, ...]
    """Element at each place: token * head_dim + dimension for keys, block_size * head_dim more for values."""

    def wire_places(self, shape: KvShape) -> Places:
        """Return the place on the wire of each element of a block's page of one layer, in the order of the memory.

        Raises ValueError unless every element has one place.
        """
        half = shape.block_size * shape.head_dim
        elements = np.array(self.elements, dtype=np.intp)
        if not np.array_equal(np.sort(elements), np.arange(2 * half)):
            raise ValueError(f"a head page does not hold {2 * half} elements, each in one place")
        is_value, element = np.divmod(elements, half)
        token, dimension = np.divmod(element, shape.head_dim)
        heads = np.arange(shape.num_kv_heads, dtype=np.intp)[:, None]
        rows = ((is_value * shape.block_size + token) * shape.num_kv_heads)[None, :] + heads
        return (rows * shape.head_dim + dimension).reshape(-1)

    def digest(self) -> str:
        """Return a name that equal orders share."""
        return hashlib.blake2b(np.array(self.elements, dtype="<u4").tobytes(), digest_size=8).hexdigest()


def learn_head_order(layer: Any, *, block_size: int, head_dim: int) -> HeadOrder:
    """Return the order of a head page's elements, by writing numbered ones with the backend's own operation."""
    num_heads = layer.impl.num_kv_heads
    half = block_size * head_dim
    found = torch.zeros(2 * half, dtype=torch.int64)
    scale = 1
    while scale < 2 * half:
        pages = torch.zeros(2, num_heads, block_size, 2 * head_dim, dtype=layer.kv_cache.dtype)
        numbered = (torch.arange(2 * half) // scale % _DIGIT).to(pages.dtype).view(2, block_size, 1, head_dim)
        keys, values = (each.expand(-1, num_heads, -1).contiguous() for each in numbered)
        layer.impl.do_kv_cache_update(layer, keys, values, pages, torch.arange(block_size, 2 * block_size))
        found += pages[1, 0].reshape(-1).to(torch.int64) * scale
        scale *= _DIGIT
    return HeadOrder(elements=tuple(found.tolist()))


def map_region(path: str, shape: KvShape, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Map the file of a region; returns its pages, [num_layers, num_blocks, num_kv_heads, elements of a head page]."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    pages = torch.frombuffer(memory, dtype=torch.uint8)[: num_blocks * shape.block_bytes].view(dtype)
    return pages.view(shape.num_layers, num_blocks, shape.num_kv_heads, -1)


class VllmPages:
    """Pages in host memory, our own or a peer's. Any thread, for blocks that the caller holds."""

    def __init__(self, region: memoryview, num_blocks: int, shape: KvShape, wire_places: Places) -> None:
        shape.check_region(region.nbytes, num_blocks)
        self._shape = shape
        element = np.dtype(f"u{shape.row_bytes // shape.head_dim}")
        pages = np.frombuffer(region, dtype=np.uint8)[:-NONCE_BYTES].view(element)
        self._pages = pages.reshape(shape.num_layers, num_blocks, -1)
        self._wire_places = wire_places
        self._memory_places = np.argsort(wire_places)

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the blocks in their form on the wire. Raises LayoutMismatch for a bad id."""
        pages = self._pages
        check_ids(block_ids, pages.shape[1])
        blocks = np.empty((len(block_ids), pages.shape[0], pages.shape[2]), dtype=pages.dtype)
        for target, block_id in zip(blocks, block_ids, strict=True):
            # "clip" writes into `out` directly, "raise" by way of a copy; the places are all good ones.
            pages[:, block_id].take(self._memory_places, axis=1, out=target, mode="clip")
        return blocks.reshape(-1).view(np.uint8).data

    def write_blocks(self, block_ids: Seq[int], data: memoryview) -> None:
        """Fill blocks from their form on the wire. Raises LayoutMismatch for a bad id or size."""
        pages = self._pages
        check_ids(block_ids, pages.shape[1])
        self._shape.check_data(data, len(block_ids))
        blocks = np.frombuffer(data, dtype=pages.dtype).reshape(len(block_ids), pages.shape[0], pages.shape[2])
        for source, block_id in zip(blocks, block_ids, strict=True):
            pages[:, block_id] = source.take(self._wire_places, axis=1)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block."""
        self._pages[:, target] = self._pages[:, source]


class VllmKvStore:
    """A `KvStore` over a region that the ranks map; see the module."""

    def __init__(self, shape: KvShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.device_sharing: DeviceSharing | None = None
        self.shared_region: SharedRegion | None
        self._memory, self.shared_region = allocate_region(num_blocks * shape.block_bytes, num_pieces=shape.num_layers)
        self._pages: VllmPages | None = None
        self._wire_places: Places | None = None

    def learn(self, order: HeadOrder) -> None:
        """Take over the order of the elements, before any block is read or written. Raises ValueError."""
        self._wire_places = order.wire_places(self.shape)
        if self.shared_region is not None:
            self.shared_region = replace(self.shared_region, page_order=order.digest())
        self._pages = VllmPages(memoryview(self._memory), self.num_blocks, self.shape, self._wire_places)

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """See `KvStore`."""
        return self._known_pages.read_blocks(block_ids)

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """See `KvStore`."""
        self._known_pages.write_blocks(block_ids, data)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """See `KvStore`. Steps run inside `launch`, so none is under way."""
        self._known_pages.copy_block(source, target)

    def map_peer(self, region: memoryview, num_blocks: int) -> VllmPages:
        """See `KvStore`. A peer of the same host has the same processor, and so the same order of elements."""
        assert self._wire_places is not None, "`learn` comes first"
        return VllmPages(region, num_blocks, self.shape, self._wire_places)

    @property
    def _known_pages(self) -> VllmPages:
        assert self._pages is not None, "`learn` comes first"
        return self._pages

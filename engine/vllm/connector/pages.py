"""vLLM's pages of one rank, as a `KvStore`: blocks leave by way of a ring in shared memory, and arrive in the pages.

Offered blocks are copied into slots of the ring at once. So vLLM has its pages back within a step, whether or not a
puller ever comes, and every transport that serves host memory serves them, whatever device the pages are on.

On the wire a block is [layer, elements of one page], a page's elements in the order in which its tensor shows them. The
attention backend decides what that order means, so its name is part of the fingerprint.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.ids import BlockId
from engine.kv_cache import HostPages
from engine.kv_store import DeviceSharing, KvShape, SharedRegion, check_ids
from engine.model.config import UnsupportedModel
from engine.shared_memory import allocate_region

_BLOCK_DIMS = 2
"""Dimensions among which the one of blocks is: [blocks, …], or keys and values apart, [2, blocks, …]."""


def page_tensors(kv_caches: Mapping[str, Tensor], num_blocks: int) -> list[Tensor]:
    """Return the distinct layers' pages with the blocks first, in the order of the model. Raises UnsupportedModel."""
    found: dict[tuple[int, int], Tensor] = {}
    for name, pages in kv_caches.items():
        if not isinstance(pages, Tensor):
            raise UnsupportedModel(f"cannot hand over layer {name}: it keeps a state, not pages of keys and values")
        dims = [dim for dim in range(min(_BLOCK_DIMS, pages.dim())) if pages.shape[dim] == num_blocks]
        if len(dims) != 1:
            raise UnsupportedModel(
                f"cannot hand over layer {name}: {num_blocks} blocks are not one dimension of {tuple(pages.shape)}"
            )
        # Layers that share their pages are one.
        found.setdefault((pages.data_ptr(), pages.stride(0)), pages.movedim(dims[0], 0))
    layers = list(found.values())
    kinds = sorted({f"{tuple(each.shape[1:])} {each.dtype}" for each in layers})
    if len(kinds) != 1:
        raise UnsupportedModel(f"cannot hand over layers of different shapes: {', '.join(kinds) or 'there are none'}")
    return layers


def shape_of(layers: Seq[Tensor], *, block_size: int, fingerprint: str) -> KvShape:
    """Return the shape of a block. Layers, keys and values are not told apart: two halves of a block stand for them."""
    page = layers[0][0]
    row_bytes, rest = divmod(len(layers) * page.numel() * page.element_size(), 2 * block_size)
    if rest:
        raise UnsupportedModel(f"cannot hand over pages of {tuple(page.shape)}: no even number of bytes per token")
    return KvShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=row_bytes // page.element_size(),
        block_size=block_size,
        dtype=str(page.dtype).removeprefix("torch."),
        row_bytes=row_bytes,
        fingerprint=fingerprint,
    )


class PageCopies(Protocol):
    """Copies between the layers' pages and host memory, [blocks, layers, bytes of a page]. Any thread."""

    def read(self, block_ids: Seq[BlockId]) -> memoryview:
        """Return a copy of pages. Raises LayoutMismatch for a bad id."""
        ...

    def write(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Fill pages. Raises LayoutMismatch for a bad id."""
        ...


class HostCopies:
    """Pages in host memory. Torch would copy them on all cores, and take those from a step that runs meanwhile."""

    def __init__(self, layers: Seq[Tensor]) -> None:
        self._layers = [layer.view(torch.uint8).numpy() for layer in layers]

    def read(self, block_ids: Seq[BlockId]) -> memoryview:
        """See `PageCopies`."""
        check_ids(block_ids, len(self._layers[0]))
        blocks = np.empty((len(block_ids), len(self._layers), *self._layers[0].shape[1:]), dtype=np.uint8)
        for block, block_id in zip(blocks, block_ids, strict=True):
            for page, layer in zip(block, self._layers, strict=True):
                page[...] = layer[block_id]
        return blocks.reshape(-1).data

    def write(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """See `PageCopies`."""
        check_ids(block_ids, len(self._layers[0]))
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(
            len(block_ids), len(self._layers), *self._layers[0].shape[1:]
        )
        for block, block_id in zip(blocks, block_ids, strict=True):
            for page, layer in zip(block, self._layers, strict=True):
                layer[block_id] = page


class DeviceCopies:
    """Pages in the memory of a device, copied on a stream of their own."""

    def __init__(self, layers: Seq[Tensor]) -> None:
        self._layers = tuple(layers)
        self._device = layers[0].device
        self._stream = None if self._device.type == "cpu" else torch.Stream(self._device)

    @torch.inference_mode()
    def read(self, block_ids: Seq[BlockId]) -> memoryview:
        """See `PageCopies`."""
        with self._on_stream():
            index = self._index(block_ids)
            blocks = torch.stack([layer[index] for layer in self._layers], dim=1).cpu()
        return blocks.view(-1).view(torch.uint8).numpy().data

    @torch.inference_mode()
    def write(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """See `PageCopies`."""
        pages = self._layers[0]
        flat = torch.from_numpy(np.frombuffer(data, dtype=np.uint8)).view(pages.dtype)
        with self._on_stream():
            index = self._index(block_ids)
            blocks = flat.view(len(block_ids), len(self._layers), *pages.shape[1:]).to(self._device)
            for i, layer in enumerate(self._layers):
                layer[index] = blocks[:, i]

    def _index(self, block_ids: Seq[BlockId]) -> Tensor:
        check_ids(block_ids, len(self._layers[0]))
        return torch.tensor(block_ids, device=self._device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:  # in tests
            yield
            return
        with self._stream:
            yield
        self._stream.synchronize()


def copies_of(layers: Seq[Tensor]) -> PageCopies:
    """Return how to copy pages that are where these are."""
    return HostCopies(layers) if layers[0].device.type == "cpu" else DeviceCopies(layers)


class RingFull(Exception):
    """There are not enough free slots."""


class RankPages:
    """See the module. Slots are taken and freed by one thread; bytes move on any."""

    device_sharing: DeviceSharing | None = None
    shared_region: SharedRegion | None

    def __init__(self, copies: "PageCopies", shape: KvShape, *, num_slots: int) -> None:
        self.shape = shape
        self.num_blocks = num_slots
        self._copies = copies
        memory, self.shared_region = allocate_region(num_slots * shape.block_bytes, num_pieces=2 * shape.num_layers)
        self._ring = HostPages(memoryview(memory), num_slots, shape)
        self._free = list(map(BlockId, reversed(range(num_slots))))

    @property
    def num_free_slots(self) -> int:
        """Slots that hold no offer."""
        return len(self._free)

    def take_slots(self, count: int) -> tuple[BlockId, ...]:
        """Return free slots, used ones first. Raises RingFull."""
        if count > self.num_free_slots:
            raise RingFull(
                f"{count} blocks do not fit into the {self.num_free_slots} of {self.num_blocks} that are free"
            )
        return tuple(self._free.pop() for _ in range(count))

    def free_slots(self, slots: Seq[BlockId]) -> None:
        """Take slots back."""
        self._free.extend(reversed(slots))

    def stage(self, block_ids: Seq[BlockId], slots: Seq[BlockId]) -> None:
        """Copy pages into slots. The steps that filled the pages have ended. Raises LayoutMismatch for a bad id."""
        self._ring.write_blocks(slots, self._copies.read(block_ids))

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """See `KvStore`; the blocks are slots."""
        return self._ring.read_blocks(block_ids)

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """See `KvStore`; the blocks are vLLM's pages."""
        self.shape.check_data(data, len(block_ids))
        self._copies.write(block_ids, data)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """See `KvStore`."""
        raise AssertionError("vLLM copies its own pages")

    def map_peer(self, region: memoryview, num_blocks: int) -> HostPages:
        """See `KvStore`; a peer's region is its ring."""
        return HostPages(region, num_blocks, self.shape)

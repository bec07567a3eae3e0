"""vLLM's pages of one rank, as a `KvStore`: blocks leave by way of a ring in shared memory, and arrive in the pages.

Offered blocks are copied into slots of the ring at once. So vLLM has its pages back within a step, whether or not a
puller ever comes, and every transport that serves host memory serves them, whatever device the pages are on.

On the wire a block is one head's part of a block, a *piece*: [layer, elements of one head's page], in the order in
which the tensors show them. So the pieces of a model are the same at any number of ranks. The attention backend decides
what the order of elements means, and its name is part of the fingerprint.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.ids import BlockId
from engine.device.shared_memory import allocate_region
from engine.kv_store import DeviceSharing, HostRing, KvShape, SharedRegion, check_ids
from engine.pages.kv_cache import HostPages
from engine.weights.config import UnsupportedModel

_LOGICAL_DIMS = 4


def page_tensors(kv_caches: Mapping[str, Tensor], num_blocks: int) -> list[Tensor]:
    """Return the distinct layers' pages, [blocks, heads, …], in the order of the model. Raises UnsupportedModel."""
    found: dict[tuple[int, int], Tensor] = {}
    for name, pages in kv_caches.items():
        if not isinstance(pages, Tensor):
            raise UnsupportedModel(f"cannot hand over layer {name}: it keeps a state, not pages of keys and values")
        # vLLM shows pages of every layout as [blocks, heads, tokens, elements]; kernels may cut blocks in parts.
        if pages.dim() != _LOGICAL_DIMS or pages.shape[0] % num_blocks:
            raise UnsupportedModel(
                f"cannot hand over layer {name}: {tuple(pages.shape)} are not {num_blocks} blocks of heads"
            )
        # Layers that share their pages are one.
        is_cut = pages.shape[0] > num_blocks
        blocks = pages.view(num_blocks, -1, *pages.shape[1:]).movedim(2, 1) if is_cut else pages
        found.setdefault((pages.data_ptr(), pages.stride(0)), blocks)
    layers = list(found.values())
    kinds = sorted({f"{tuple(each.shape[1:])} {each.dtype}" for each in layers})
    if len(kinds) != 1:
        raise UnsupportedModel(f"cannot hand over layers of different shapes: {', '.join(kinds) or 'there are none'}")
    return layers


def shape_of(layers: Seq[Tensor], *, block_size: int, fingerprint: str) -> KvShape:
    """Return the shape of a piece. Layers, keys and values are not told apart: two halves of a piece stand for them."""
    page = layers[0][0, 0]
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
    """Copies between the layers' pages and pieces in host memory, [pieces, layers, bytes of a page]. Any thread."""

    num_heads: int
    """Heads of this rank."""

    def read(self, block_ids: Seq[BlockId], heads: range) -> memoryview:
        """Return a copy of the pieces of some heads, block by block. Raises LayoutMismatch for a bad id."""
        ...

    def write(self, pieces: Seq[BlockId], data: memoryview) -> None:
        """Fill pieces, numbered as block * num_heads + head. Raises LayoutMismatch for a bad number."""
        ...


class HostCopies:
    """Pages in host memory. Torch would copy them on all cores, and take those from a step that runs meanwhile."""

    def __init__(self, layers: Seq[Tensor]) -> None:
        self._layers = [layer.view(torch.uint8).numpy() for layer in layers]
        self._num_blocks, self.num_heads, *self._page = self._layers[0].shape

    def read(self, block_ids: Seq[BlockId], heads: range) -> memoryview:
        """See `PageCopies`."""
        check_ids(block_ids, self._num_blocks)
        num_heads = len(heads)
        blocks = np.empty((len(block_ids), num_heads, len(self._layers), *self._page), dtype=np.uint8)
        for block, block_id in zip(blocks, block_ids, strict=True):
            for i, layer in enumerate(self._layers):
                block[:, i] = layer[block_id, heads.start : heads.stop]
        return blocks.reshape(-1).data

    def write(self, pieces: Seq[BlockId], data: memoryview) -> None:
        """See `PageCopies`."""
        check_ids(pieces, self._num_blocks * self.num_heads)
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(len(pieces), len(self._layers), *self._page)
        for block, piece in zip(blocks, pieces, strict=True):
            place = divmod(piece, self.num_heads)
            for page, layer in zip(block, self._layers, strict=True):
                layer[place] = page


class DeviceCopies:
    """Pages in the memory of a device, copied by way of pinned memory on a stream of their own."""

    def __init__(self, layers: Seq[Tensor]) -> None:
        self._layers = tuple(layers)
        self._num_blocks, self.num_heads, *self._page = layers[0].shape
        self._device = layers[0].device
        self._stream = None if self._device.type == "cpu" else torch.Stream(self._device)

    @torch.inference_mode()
    def read(self, block_ids: Seq[BlockId], heads: range) -> memoryview:
        """See `PageCopies`."""
        check_ids(block_ids, self._num_blocks)
        with self._on_stream():
            index = torch.tensor(block_ids, device=self._device)
            pieces = torch.stack([layer[index, heads.start : heads.stop] for layer in self._layers], dim=2)
            found = torch.empty_like(pieces, device="cpu", pin_memory=self._stream is not None)
            found.copy_(pieces, non_blocking=True)
        return found.view(-1).view(torch.uint8).numpy().data

    @torch.inference_mode()
    def write(self, pieces: Seq[BlockId], data: memoryview) -> None:
        """See `PageCopies`."""
        check_ids(pieces, self._num_blocks * self.num_heads)
        flat = torch.from_numpy(np.frombuffer(data, dtype=np.uint8)).view(self._layers[0].dtype)
        if self._stream is not None:
            flat = flat.pin_memory()
        with self._on_stream():
            index = torch.tensor(pieces, device=self._device)
            block, head = index // self.num_heads, index % self.num_heads
            pages = flat.view(len(pieces), len(self._layers), *self._page).to(self._device, non_blocking=True)
            for i, layer in enumerate(self._layers):
                layer[block, head] = pages[:, i]

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
    """See the module. A slot holds a piece. Slots are taken and freed by one thread; bytes move on any."""

    device_sharing: DeviceSharing | None = None
    host_ring: HostRing | None = None
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
                f"{count} pieces do not fit into the {self.num_free_slots} of {self.num_blocks} slots that are free"
            )
        return tuple(self._free.pop() for _ in range(count))

    def free_slots(self, slots: Seq[BlockId]) -> None:
        """Take slots back."""
        self._free.extend(reversed(slots))

    def stage(self, block_ids: Seq[BlockId], heads: range, slots: Seq[BlockId]) -> None:
        """Copy heads of pages into slots, block by block. The steps that filled the pages have ended.

        Raises LayoutMismatch for a bad id.
        """
        self._ring.write_blocks(slots, self._copies.read(block_ids, heads))

    def pieces(self, block_ids: Seq[BlockId], heads: range) -> tuple[BlockId, ...]:
        """Return the pieces of heads of pages, block by block, as `write_blocks` numbers them."""
        num_heads = self._copies.num_heads
        return tuple(BlockId(block_id * num_heads + head) for block_id in block_ids for head in heads)

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """See `KvStore`; the blocks are slots."""
        return self._ring.read_blocks(block_ids)

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """See `KvStore`; the blocks are pieces of vLLM's pages."""
        self.shape.check_data(data, len(block_ids))
        self._copies.write(block_ids, data)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """See `KvStore`."""
        raise AssertionError("vLLM copies its own pages")

    def map_peer(self, region: memoryview, num_blocks: int) -> HostPages:
        """See `KvStore`; a peer's region is its ring."""
        return HostPages(region, num_blocks, self.shape)

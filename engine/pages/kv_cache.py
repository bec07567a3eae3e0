"""The pages' bytes: one storage for all layers, in host memory that peers can map, or on a device.

On the wire a block's bytes lie together, [num_layers, parts, page], and in device memory, too: a block is one piece,
which one copy moves. In host memory a layer's keys do, [num_layers, parts, num_blocks, page]: attention there reads a
layer at a time. A page is one layer's keys, values or latent rows of a block: plainly [block_size, num_kv_heads,
head_dim], or, on CPUs (`engine.pages.kv_format`), in groups

    keys    [block_size / 16, num_kv_heads, head_dim / pack, 16 tokens, pack dimensions]
    values  [block_size / 16, num_kv_heads, 16 / pack, head_dim, pack tokens]

with `pack` values in four bytes, two of bfloat16 or one of float32; or codes (latent rows as keys) with their scales
behind them,

    keys    [block_size / 16, num_kv_heads, row_bytes / 4, 16 tokens, 4 bytes]
    values  [block_size / 16, num_kv_heads, 4, row_bytes, 4 tokens]
    scales  [block_size / 16, num_kv_heads, row_scales, 16 tokens], bfloat16

in both of which one instruction of a CPU multiplies sixteen times four bytes, without moving any. So scales travel, and
are cached, copied and evicted, with their block, by code that sees nothing but bytes.
"""

import mmap
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.errors import LayoutMismatch
from common.ids import BlockId
from engine.device.host_ring import make_ring
from engine.device.ipc import share_pages
from engine.device.kv_copy import DevicePages
from engine.device.memory import NoRoomForPages
from engine.device.shared_memory import allocate_region
from engine.kv_store import NONCE_BYTES, DeviceSharing, HostRing, KvShape, SharedRegion, WindowedLayers, check_ids
from engine.pages.kv_format import KvDtype, KvFormat, format_named, page_format
from engine.pages.window_pages import split_budget
from engine.weights.config import DecoderConfig, TransformersConfig

Bytes = npt.NDArray[np.uint8]


def num_blocks_for_budget(kv_bytes: int, shape: KvShape, *, max_step_tokens: int = 0) -> int:
    """Return how many blocks fit in `kv_bytes`, beside their window pages. Raises NoRoomForPages without room for one.

    `max_step_tokens`: most tokens of a sequence in one step.
    """
    if shape.windowed is None:
        num_blocks = kv_bytes // shape.block_bytes
    else:
        num_blocks, _num_pages = split_budget(kv_bytes, shape, max_step_tokens)
    if num_blocks < 1:
        raise NoRoomForPages(
            f"{kv_bytes} bytes of KV memory hold no page of {shape.block_bytes + shape.window_page_bytes} bytes:"
            " raise kv_memory_gib"
        )
    return num_blocks


def windowed_layers(config: DecoderConfig | TransformersConfig, max_model_len: int) -> WindowedLayers | None:
    """Return the layers that need pages of their own: recurrent ones, or those with windows shorter than the texts."""
    if config.recurrent is not None:
        return WindowedLayers(
            layers=tuple(sorted(config.recurrent.layers)), num_tokens=1, state_size=config.recurrent.state_size
        )
    layers = tuple(layer_idx for layer_idx, window in enumerate(config.kv_windows) if window is not None)
    windows = {window for window in config.kv_windows if window is not None}
    if not windows or len(layers) == len(config.kv_windows):
        return None
    longest = max(windows, key=lambda window: window.num_tokens)
    if 2 * longest.num_tokens > max_model_len:
        return None
    return WindowedLayers(layers=layers, num_tokens=longest.num_tokens, is_chunk=longest.is_chunk)


def kv_shape(
    config: DecoderConfig | TransformersConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    fingerprint: str,
    kv_dtype: KvDtype | KvFormat = "auto",
    windowed: WindowedLayers | None = None,
) -> KvShape:
    """Return the shape of the pages of a model that computes in `dtype`.

    `kv_dtype`: the format, or what `page_format` makes one of for a CPU.
    """
    pages = kv_dtype if isinstance(kv_dtype, KvFormat) else page_format(kv_dtype, dtype, config, block_size=block_size)
    return KvShape(
        num_layers=len(config.kv_windows),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=pages.name,
        row_bytes=pages.row_bytes(config.head_dim),
        fingerprint=fingerprint if windowed is None else f"{fingerprint}/{windowed.window}",
        parts_per_layer=config.kv_parts_per_layer,
        windowed=windowed,
    )


class HostPages:
    """Pages in host memory, our own or mapped, as bytes. Any thread, for blocks that the caller holds.

    Behind the blocks of a region lie its window pages, then a nonce.
    """

    def __init__(self, region: memoryview, num_blocks: int, shape: KvShape, *, num_pieces: int | None = None) -> None:
        """`num_pieces`: see `SharedRegion`; None: a part is one each."""
        num_window_pages = shape.check_region(region.nbytes, num_blocks)
        pages = np.frombuffer(region, dtype=np.uint8)[:-NONCE_BYTES]
        split = num_blocks * shape.block_bytes
        num_pieces = num_pieces or shape.num_parts
        # [pieces, num_blocks, bytes of one block's piece]
        self._blocks: Bytes = pages[:split].reshape(num_pieces, num_blocks, -1)
        self._window_pages: Bytes = pages[split:].reshape(
            shape.num_windowed_parts, num_window_pages, shape.windowed_part_bytes
        )
        self._num_blocks = num_blocks

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the pages' bytes, one after the other. Raises LayoutMismatch for a bad id."""
        pages, indexes = self._pages_of(block_ids)
        blocks = np.empty((len(indexes), *pages[:, 0].shape), dtype=np.uint8)
        for target, index in zip(blocks, indexes, strict=True):
            target[:] = pages[:, index]
        return blocks.reshape(-1).data

    def write_blocks(self, block_ids: Seq[int], data: memoryview) -> None:
        """Fill pages from bytes laid out as `read_blocks` returns them. Raises LayoutMismatch for a bad id or size."""
        pages, indexes = self._pages_of(block_ids)
        num_bytes = len(indexes) * pages[:, 0].nbytes
        if data.nbytes != num_bytes:
            raise LayoutMismatch(f"{len(indexes)} blocks take {num_bytes} bytes, not {data.nbytes}")
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(len(indexes), *pages[:, 0].shape)
        for source, index in zip(blocks, indexes, strict=True):
            pages[:, index] = source

    def _pages_of(self, block_ids: Seq[int]) -> tuple[Bytes, Seq[int]]:
        """Return the pages of the kind that these ids name, and the ids' indexes there."""
        if block_ids and block_ids[0] >= self._num_blocks:
            indexes = [block_id - self._num_blocks for block_id in block_ids]
            check_ids(indexes, self._window_pages.shape[1])
            return self._window_pages, indexes
        check_ids(block_ids, self._num_blocks)
        return self._blocks, block_ids


class TorchKvStore:
    """Pages of one engine as tensors; a `KvStore`.

    `layers[i]` has the parts of layer i, (keys, values) or (latent rows,): views [num_pages, block_size, num_kv_heads,
    head_dim] of the one storage, in which each page is contiguous; layers with window pages have as many pages as there
    are of those, all others as many as there are blocks. Pages in groups are [num_pages, block_size / 16, num_kv_heads,
    16 * head_dim], of codes [num_pages, page] bytes; `engine.ops.torch_pages` finds rows in both. A recurrent layer has
    (states,), float32 [num_pages, state_size]. In host memory pages can be mapped by other processes of the host, in
    device memory by those on the same card, or on one that reads it.
    """

    def __init__(
        self,
        shape: KvShape,
        num_blocks: int,
        *,
        device: torch.device,
        num_window_pages: int = 0,
        memory: mmap.mmap | None = None,
        is_like_device: bool = False,
    ) -> None:
        """`num_window_pages`: only in host memory, for a shape with windowed layers. `memory`: pages of another process
        that this one has mapped, to write, too; None: of its own. `is_like_device`: on a CPU, too, pages lie, and are
        read and written, as on a device.
        """
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_window_pages = num_window_pages
        self.window_page_of = array("i", [-1]) * (num_blocks if shape.windowed else 0)
        self.shared_region: SharedRegion | None = None
        self.device_sharing: DeviceSharing | None = None
        self.host_ring: HostRing | None = None
        self.kv_format = format_named(shape.dtype)
        kv_bytes = num_blocks * shape.block_bytes
        window_bytes = num_window_pages * shape.window_page_bytes
        self._bytes: HostPages | DevicePages
        if device.type == "cpu" and not is_like_device:
            if memory is None:
                memory, self.shared_region = allocate_region(
                    kv_bytes + window_bytes, num_pieces=shape.num_parts, num_window_pieces=shape.num_windowed_parts
                )
            self._bytes = HostPages(memoryview(memory), num_blocks, shape)
            storage = torch.frombuffer(memory, dtype=torch.uint8)
            self._pages = storage[:kv_bytes].view(-1, shape.parts_per_layer, num_blocks, shape.part_bytes)
        else:
            storage = torch.zeros(kv_bytes + NONCE_BYTES, dtype=torch.uint8, device=device)
            blocks = storage[:kv_bytes].view(num_blocks, -1, shape.parts_per_layer, shape.part_bytes)
            self._pages = blocks.permute(1, 2, 0, 3)
            self._bytes = DevicePages(storage[:kv_bytes], shape)
            self.device_sharing = share_pages(storage, self._bytes)
            self.host_ring = make_ring(self._bytes)
        self._window_pages = (
            storage[kv_bytes : kv_bytes + window_bytes].view(
                len(shape.windowed.layers), -1, num_window_pages, shape.windowed_part_bytes
            )
            if shape.windowed is not None
            else None
        )
        self.layers: tuple[tuple[Tensor, ...], ...] = tuple(self._layers())

    def _layers(self) -> Iterator[tuple[Tensor, ...]]:
        windowed = self.shape.windowed.layers if self.shape.windowed else ()
        pages = iter(self._pages)
        window_pages = iter(() if self._window_pages is None else self._window_pages)
        for layer_idx in range(self.shape.num_layers):
            layer = next(window_pages if layer_idx in windowed else pages)
            if layer_idx in self.shape.state_layers:
                layer = layer.view(torch.float32)
            elif not self.kv_format.has_codes:
                size = self.kv_format.group_size
                rows = (self.shape.block_size // size, self.shape.num_kv_heads, size * self.shape.head_dim)
                layer = layer.view(self.kv_format.dtype).view(*layer.shape[:2], *rows)
            yield tuple(layer)

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """Return a copy of the pages' bytes, one after the other. Raises LayoutMismatch for a bad id."""
        return self._bytes.read_blocks(block_ids)

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """Fill pages from bytes laid out as `read_blocks` returns them. Raises LayoutMismatch for a bad id or size."""
        self._bytes.write_blocks(block_ids, data)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block, with its window page, inside the pool, in order with the steps. Engine thread only."""
        self._pages[:, :, target] = self._pages[:, :, source]
        if self._window_pages is not None:
            source_page, target_page = self.window_page_of[source], self.window_page_of[target]
            self._window_pages[:, :, target_page] = self._window_pages[:, :, source_page]

    def clear_blocks(self, block_ids: Seq[BlockId]) -> None:
        """Zero blocks and their rows in window pages, in order with the steps. Engine thread only."""
        self._pages.index_fill_(2, self._index(block_ids), 0)
        if self._window_pages is not None and self.shape.window_layers:
            window_pages = [self.window_page_of[block_id] for block_id in block_ids]
            self._window_pages.index_fill_(2, self._index(window_pages), 0)

    def map_peer(self, region: memoryview, num_blocks: int) -> HostPages:
        """Interpret another process's region as pages of this shape. Raises LayoutMismatch when its size is wrong."""
        return HostPages(region, num_blocks, self.shape)

    def _index(self, block_ids: Seq[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._pages.device)

"""Staged blocks: copies of vLLM's pages in host memory that the worker and all ranks of its vLLM share.

Blocks leave and enter vLLM's pages by way of these *slots*: a rank copies pages into slots or slots into pages within
the step that computes or reads them, so vLLM has its pages back when a request ends, even before they are pulled.
The worker serves and fills slots like the pages of any engine (`StagedStore`), whatever device vLLM's pages are on.

The region is [num_layers, num_slots, page of all ranks]; a rank's part is a view of its own heads. So the bytes of a
block do not depend on the number of ranks, where a backend's pages begin with the heads.
"""

import mmap
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from common.ids import BlockId
from engine.device.shared_memory import allocate_region
from engine.kv_store import DeviceSharing, HostRing, KvShape, SharedRegion
from engine.pages.kv_cache import HostPages


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """A rank's part of the pages of all ranks."""

    page_shape: tuple[int, ...]
    """Shape of a page of all ranks together."""
    first: int
    """First of the page's rows, along its first dimension, that are the rank's."""
    num_rows: int


def page_part(page: Tensor, *, num_rows: int, rank: int, num_ranks: int) -> PagePart:
    """Return the part of `rank`, of whose pages `page` is one, in pages with `num_rows` rows of all ranks.

    With more ranks than heads, neighbours have the same head, and write the same values.
    """
    first = rank * num_rows // num_ranks
    return PagePart(page_shape=(num_rows, *page.shape[1:]), first=first, num_rows=page.shape[0])


class RankStaging:
    """Copies between a rank's pages and the slots. The model runner's thread only."""

    def __init__(self, layers: Seq[Tensor], part: PagePart, region_path: str) -> None:
        """`layers`: pages with the blocks first."""
        self._layers = layers
        fd = os.open(region_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        page = layers[0][0]
        num_slots = (len(memory) // page.element_size()) // (len(layers) * prod(part.page_shape))
        num_bytes = num_slots * len(layers) * prod(part.page_shape) * page.element_size()
        region = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(page.dtype)
        slots = region.view(len(layers), num_slots, *part.page_shape)
        self._slots = slots.narrow(2, part.first, part.num_rows)

    @torch.inference_mode()
    def store(self, block_ids: Seq[int], slots: Seq[int]) -> None:
        """Copy pages into slots, and wait until they are there."""
        pages = torch.tensor(block_ids, dtype=torch.int64, device=self._layers[0].device)
        targets = torch.tensor(slots, dtype=torch.int64)
        for layer, staged in zip(self._layers, self._slots, strict=True):
            staged[targets] = layer[pages].to(staged.device)

    @torch.inference_mode()
    def load(self, block_ids: Seq[int], slots: Seq[int]) -> None:
        """Copy slots into pages, before whatever the device is given next."""
        pages = torch.tensor(block_ids, dtype=torch.int64, device=self._layers[0].device)
        sources = torch.tensor(slots, dtype=torch.int64)
        for layer, staged in zip(self._layers, self._slots, strict=True):
            layer[pages] = staged[sources].to(layer.device)


class StagedStore:
    """A `KvStore` over the slots. Slots are taken and freed on the event loop; bytes move on any thread."""

    device_sharing: DeviceSharing | None = None
    host_ring: HostRing | None = None

    def __init__(self, shape: KvShape, num_slots: int, *, page_order: str) -> None:
        self.shape = shape
        self.num_blocks = num_slots
        memory, region = allocate_region(num_slots * shape.block_bytes, num_pieces=shape.num_layers)
        self.shared_region: SharedRegion | None = region and replace(region, page_order=page_order)
        self._memory = memory
        self._pages = self.map_peer(memoryview(memory), num_slots)
        self._free = list(map(BlockId, reversed(range(num_slots))))

    @property
    def region_path(self) -> str:
        """File of the region, for this worker's ranks."""
        assert self.shared_region is not None, "`start_vllm` has looked"
        return f"/proc/{os.getpid()}/fd/{self.shared_region.fd}"

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> tuple[BlockId, ...]:
        """Return free slots, used ones first; there are as many (`num_free`)."""
        return tuple(self._free.pop() for _ in range(count))

    def free(self, slots: Seq[BlockId]) -> None:
        """Take slots back."""
        self._free.extend(reversed(slots))

    def read_blocks(self, block_ids: Seq[BlockId]) -> memoryview:
        """See `KvStore`."""
        return self._pages.read_blocks(block_ids)

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        """See `KvStore`."""
        self._pages.write_blocks(block_ids, data)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """See `KvStore`."""
        raise AssertionError("vLLM copies its own pages")

    def map_peer(self, region: memoryview, num_blocks: int) -> HostPages:
        """See `KvStore`."""
        return HostPages(region, num_blocks, self.shape, num_pieces=self.shape.num_layers)

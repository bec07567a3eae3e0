"""Host memory through which other processes of the host get pages that lie in device memory.

Two cards of one host cannot always map each other's memory. The owner of the pages then copies blocks into a slot of
this ring, which the device reaches at full speed because it is pinned, and the puller, which maps the ring as it maps
host pages, copies them out of it. The memory is bounded, allocated once, and freed with the last process that maps it.
"""

import logging
import weakref
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from common.ids import BlockId
from engine.device.kv_copy import DevicePages
from engine.device.shared_memory import allocate_region
from engine.kv_store import PIECE_BYTES, SharedRegion

logger = logging.getLogger(__name__)

_NUM_SLOTS = 4


class PinnedRing:
    """A `HostRing` of some device pages; see the module."""

    def __init__(self, pages: DevicePages, memory: Tensor, region: SharedRegion, *, blocks_per_slot: int) -> None:
        """`memory`: uint8, the region's bytes."""
        self.region = region
        self.blocks_per_slot = blocks_per_slot
        self.num_slots = _NUM_SLOTS
        self._pages = pages
        self._memory = memory

    def fill(self, slot: int, block_ids: Seq[BlockId]) -> range:
        """See `HostRing`. Raises LayoutMismatch for a bad id."""
        assert 0 <= slot < self.num_slots, slot
        assert len(block_ids) <= self.blocks_per_slot, len(block_ids)
        first, size = slot * self.blocks_per_slot, self._pages.shape.block_bytes
        self._pages.read_into(self._memory[first * size : (first + len(block_ids)) * size], block_ids)
        return range(first, first + len(block_ids))


def make_ring(pages: DevicePages) -> PinnedRing | None:
    """Return a ring for these pages, or None where the system has no memory that processes can share."""
    blocks_per_slot = max(1, PIECE_BYTES // pages.shape.block_bytes)
    mapped, region = allocate_region(_NUM_SLOTS * blocks_per_slot * pages.shape.block_bytes)
    if region is None:
        return None
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    if pages.blocks.is_cuda:
        _pin(memory, pages.blocks.device)
    return PinnedRing(pages, memory, region, blocks_per_slot=blocks_per_slot)


def _pin(memory: Tensor, device: torch.device) -> None:
    """Pin host memory until the tensor is freed; where the system refuses, copies are slower."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(address, memory.numel(), 0))
    if code:
        logger.warning("cannot pin %d bytes of host memory for transfers: CUDA error %d", memory.numel(), code)
    else:
        weakref.finalize(memory, runtime.cudaHostUnregister, address)

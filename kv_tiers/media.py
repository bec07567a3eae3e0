"""The medium of a tier: bytes of slots, by number. Host memory is here, a folder in `disk.py`."""

import mmap
from abc import ABC, abstractmethod
from contextlib import suppress

import xxhash

from common.ids import BlockHash, HashRoot
from kv_tiers.faults import FaultKind, TierFault
from kv_tiers.slots import Slot


class Medium(ABC):
    """Reads and writes slots. Any thread, but one slot is either written by one thread or read by several."""

    @abstractmethod
    def write(self, slot: Slot, root: HashRoot, data: memoryview) -> bytes:
        """Write a block and return its seal. Raises TierFault; the slot then holds nothing."""

    @abstractmethod
    def read(self, slot: Slot, root: HashRoot) -> bytes:
        """Return a copy of a block, equal to what was written. Raises TierFault."""

    @abstractmethod
    def erase(self, slot: Slot) -> None:
        """Overwrite a block. Raises TierFault."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory or files. Nothing else may be running."""

    def note_use(self, slot: Slot) -> None:  # noqa: B027  where nothing survives
        """Remember `slot.used` over a restart. Raises TierFault. Called for a slot that is pinned."""

    def sync(self) -> None:  # noqa: B027
        """Wait until what was erased is erased on the device. Raises TierFault."""

    def remove(self) -> None:  # noqa: B027
        """Remove everything, where something cannot be erased. Raises TierFault."""


class HostMedium(Medium):
    """Memory of this process, outside of the interpreter's heap; it takes pages as slots are used first.

    Bytes are as they were put, as in the workers' own pages. A seal is XXH3 of 128 bits over them and the block's hash:
    it finds broken memory and errors of this code, which are not attackers.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        """Raise OSError or ValueError when the system has no room for the region."""
        self._block_bytes = block_bytes
        self._map = mmap.mmap(-1, num_slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them; a first write is four times as fast with them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = memoryview(self._map)

    def write(self, slot: Slot, root: HashRoot, data: memoryview) -> bytes:
        """See `Medium`."""
        seal = _check_of(slot.block_hash, data)
        self._at(slot)[:] = data
        return seal

    def read(self, slot: Slot, root: HashRoot) -> bytes:
        """See `Medium`."""
        data = bytes(self._at(slot))
        if _check_of(slot.block_hash, data) != slot.seal:
            raise TierFault(FaultKind.FLIPPED, "host memory returned other bytes than it was given")
        return data

    def erase(self, slot: Slot) -> None:
        """See `Medium`."""
        self._at(slot)[:] = bytes(self._block_bytes)

    def close(self) -> None:
        """See `Medium`."""
        self._bytes.release()
        self._map.close()

    def _at(self, slot: Slot) -> memoryview:
        return self._bytes[slot.number * self._block_bytes : (slot.number + 1) * self._block_bytes]


def _check_of(block_hash: BlockHash, data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data, seed=int.from_bytes(block_hash[:8], "little"))

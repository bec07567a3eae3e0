"""The memory through which ranks add up their sums."""

import ctypes
import mmap
import os

from engine.device.shared_memory import allocate_region
from engine.ops.cpu.library import CpuKernels, Ranks
from engine.weights.config import DecoderConfig
from engine.weights.ranks import Rank
from engine.weights.segments import num_segments

_ROWS_TOGETHER = 256
_LEAST_FLOATS = 1 << 22


def buffer_size(config: DecoderConfig) -> int:
    """Return the floats of one buffer: sums of all segments for some rows, and the logits of some."""
    sums = num_segments(config) * config.hidden_size * _ROWS_TOGETHER
    return max(_LEAST_FLOATS, sums, _ROWS_TOGETHER // 4 * config.vocab_size)


class RankMemory:
    """One rank's view of the memory that all of them share; pages are taken from the system when they are written."""

    def __init__(self, rank: Rank, kernels: CpuKernels, memory: mmap.mmap, num_floats: int) -> None:
        self._memory = memory
        self._kernels = kernels
        shared = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.struct = Ranks(rank=rank.idx, size=rank.size, shared=shared, buffer_size=num_floats)
        """For kernels; valid while this object lives."""

    def abort(self) -> None:
        """Let no rank wait for the others any more: their results are then wrong. Any thread."""
        self._kernels.abort_ranks(ctypes.byref(self.struct))

    @property
    def is_aborted(self) -> bool:
        """Whether a rank was lost."""
        return self._kernels.is_aborted(ctypes.byref(self.struct))


def allocate_memory(kernels: CpuKernels, num_floats: int) -> tuple[mmap.mmap, int]:
    """Return memory for ranks, and the descriptor by which the others map it. Raises OSError without a way to share."""
    memory, region = allocate_region(kernels.shared_size(num_floats))
    if region is None:
        raise OSError("cannot share memory among ranks: this system has no memfd_create")
    return memory, region.fd


def map_memory(fd: int) -> mmap.mmap:
    """Return the memory behind a descriptor, writable, and close the descriptor."""
    memory = mmap.mmap(fd, os.fstat(fd).st_size)
    os.close(fd)
    return memory

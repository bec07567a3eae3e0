"""Memory for weights that are streamed at every step, on huge pages where the system grants them.

With 4 KiB pages a core spends its time on address translation: on virtual machines one thread reads up to half as fast
again from 2 MiB pages (benchmarks/README.md). One block for all weights, since most of them are smaller than a page.
"""

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class Arena:
    """A block of memory that is handed out piece by piece, and freed when the last piece is gone."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve room for pieces that add up to `num_bytes` as `padded` counts them."""
        size = max(1, -(-num_bytes // _HUGE_PAGE)) * _HUGE_PAGE
        self._memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: small pages will do
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        everything = torch.frombuffer(self._memory, dtype=torch.uint8)
        start = -everything.data_ptr() % _HUGE_PAGE
        self._free = everything[start : start + size]

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor [count], aligned to a cache line."""
        num_bytes = padded(count, dtype)
        assert num_bytes <= len(self._free), f"{num_bytes} bytes of {len(self._free)}"
        piece, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return piece[: count * dtype.itemsize].view(dtype)


def padded(count: int, dtype: torch.dtype) -> int:
    """Return the bytes that a piece takes."""
    return -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

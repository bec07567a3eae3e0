"""Projections on a CPU whose weights are packed: for the compiled kernels, or for oneDNN."""

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.weights import DecoderWeights, Linear
from engine.ops.cpu.library import CpuKernels, PackedWeight

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
# Two rows meet a slow oneDNN kernel, ten times slower than four rows on some processors.
_SLOW_ROWS, _PADDED_ROWS = 2, 4


class Arena:
    """One block of memory for all weights, handed out piece by piece and freed with the last piece.

    It lies on huge pages where the system grants them: weights are streamed at every step, and with 4 KiB pages a core
    spends its time on address translation (half the read rate on virtual machines; benchmarks/README.md).
    """

    def __init__(self, num_bytes: int) -> None:
        """Reserve memory for pieces whose `padded` sizes add up to `num_bytes`."""
        size = max(1, -(-num_bytes // _HUGE_PAGE)) * _HUGE_PAGE
        self._memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
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
    """Return the size of a piece in bytes."""
    return -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class PackedLinear:
    """A projection that is read as one stream per product: with few rows it runs at the speed of memory.

    Rows are independent: a row's result does not change with the other rows, bit for bit.
    """

    def __init__(self, linear: Linear, kernels: CpuKernels, arena: Arena) -> None:
        """Copy the weight [out_features, in_features] into the kernels' layout. in_features must be even."""
        self._kernels = kernels
        out_features, in_features = linear.weight.shape
        self._bias = linear.bias
        weight = linear.weight.contiguous()
        self._packed = arena.allocate(_packed_size(linear, kernels), weight.dtype)
        kernels.pack(weight.data_ptr(), self._packed.data_ptr(), out_features, in_features)
        self.address = PackedWeight(
            packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            columns=out_features,
            depth=in_features,
        )
        """Address for kernels that take several weights; valid while this object lives."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features]; x is contiguous [num_tokens, in_features]."""
        return self._multiply(self._kernels.linear, x, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """Return the product in float32, without rounding the sums."""
        return self._multiply(self._kernels.wide_linear, x, torch.float32)

    def _multiply(self, kernel: Callable[..., None], x: Tensor, dtype: torch.dtype) -> Tensor:
        weight, num_tokens = self.address, x.shape[0]
        y = torch.empty((num_tokens, weight.columns), dtype=dtype)
        kernel(x.data_ptr(), weight.packed, weight.bias, y.data_ptr(), num_tokens, weight.columns, weight.depth)
        return y


def can_pack_all(weights: DecoderWeights) -> bool:
    """Whether the kernels take every projection: they multiply two numbers of a row at a time."""
    return all(linear.weight.shape[1] % 2 == 0 for linear in weights.plain_projections())


def pack_projections(weights: DecoderWeights, kernels: CpuKernels) -> None:
    """Replace every projection by a packed one. Mutates `weights`."""
    sizes = (padded(_packed_size(linear, kernels), linear.weight.dtype) for linear in weights.plain_projections())
    arena = Arena(sum(sizes))
    weights.replace_projections(lambda linear: PackedLinear(linear, kernels, arena))


def _packed_size(linear: Linear, kernels: CpuKernels) -> int:
    return int(kernels.packed_size(*linear.weight.shape))


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with packed weights of this dtype on this CPU."""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not is_built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return weight.dtype is torch.float32


class OneDnnLinear:
    """A projection in oneDNN's blocked layout, for CPUs with tile registers and where our kernels are not compiled.

    A plain weight would be rearranged inside every single matrix product.
    """

    def __init__(self, linear: Linear) -> None:
        """Copy the weight [out_features, in_features]."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, None)  # noqa: SLF001 - its only name
        self._bias = linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features]."""
        num_tokens = x.shape[0]
        if num_tokens == _SLOW_ROWS:
            x = F.pad(x, (0, 0, 0, _PADDED_ROWS - _SLOW_ROWS))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x, self._weight, self._bias, "none", [], ""
        )
        return product[:num_tokens]

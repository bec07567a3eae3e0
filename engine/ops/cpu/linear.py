"""Projections on a CPU whose weights are packed: for the compiled kernels, or for oneDNN."""

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.cpu.library import CpuKernels, GroupedCodes, PackedWeight
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import HEAD_FIELD, Convert, DecoderWeights, Linear, Projection
from engine.weights.grouped import GroupedLinear, GroupedWeight
from engine.weights.layout import all_projections
from engine.weights.ranks import CUT_BY_INPUTS

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
_BLOCK, _LANES = 32, 16  # kBlock and kLanes of the kernels
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthParts:
    """Segments of the depth of projections that add up what several ranks may have (`engine.weights.ranks`)."""

    num_segments: int = 1
    """Segments in this process."""
    ranks: Any = None
    """Address of the `Ranks` that have the others; None: there are none."""


class PackedLinear:
    """A projection that is read as one stream per product: with few rows it runs at the speed of memory.

    Rows are independent: a row's result does not change with the other rows, bit for bit.
    """

    def __init__(self, address: PackedWeight, memory: tuple[Tensor | None, ...], kernels: CpuKernels) -> None:
        """Take a weight in the kernels' layout, and the memory that its addresses point to."""
        self.address = address
        """Address for kernels that take several weights; valid while this object lives."""
        self._memory = memory
        self._kernels = kernels

    @property
    def num_bytes(self) -> int:
        """See `Projection`."""
        return sum(each.nbytes for each in self._memory if each is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features]; x is contiguous [num_tokens, in_features]."""
        return self._multiply(self._kernels.linear, x, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """Return the product in float32, without rounding the sums."""
        return self._multiply(self._kernels.wide_linear, x, torch.float32)

    def _multiply(self, kernel: Callable[..., None], x: Tensor, dtype: torch.dtype) -> Tensor:
        y = torch.empty((x.shape[0], self.address.columns), dtype=dtype)
        kernel(ctypes.byref(self.address), x.data_ptr(), y.data_ptr(), x.shape[0])
        return y


def can_pack_all(weights: DecoderWeights) -> bool:
    """Whether the kernels take every plain and grouped projection."""
    return all(_can_pack(projection) for projection in weights.projections())


def _can_pack(projection: Projection) -> bool:
    match projection:
        case Linear():
            return projection.weight.shape[1] % 2 == 0  # two numbers of a row are multiplied at a time
        case GroupedLinear():
            weight = projection.weight
            return weight.group_size % _BLOCK == 0 or weight.group_size >= weight.shape[1]
        case _:
            return True  # it stays as it is


def grouped_packer(config: DecoderConfig, kernels: CpuKernels) -> Convert:
    """Return the conversion of grouped projections of a model into packed ones, which leaves others as they are.

    Its arena is larger than what it will hold, as scales may need 32 bits; pages that are never written cost nothing.
    """
    shapes = [(sum(each.rows), each.in_features) for each in all_projections(config)]
    shapes.append((config.vocab_size, config.hidden_size))
    arena = Arena(sum(_largest_packed_bytes(*shape, kernels) for shape in shapes))

    def pack(field: str, projection: Projection) -> Projection:
        if isinstance(projection, GroupedLinear) and _can_pack(projection):
            return pack_grouped(projection, kernels, arena, in_tiles=_is_for_tiles(field, kernels))
        return projection

    return pack


def _largest_packed_bytes(columns: int, depth: int, kernels: CpuKernels) -> int:
    """Return the most that a grouped weight of any format takes of the arena."""
    grid = padded(-(-columns // _LANES) * _LANES * -(-depth // _BLOCK), torch.float32)
    return padded(kernels.codes_size(columns, depth, 8), torch.uint8) + 2 * grid


def pack_projections(weights: DecoderWeights, kernels: CpuKernels, depth: DepthParts | None = None) -> None:
    """Replace every plain and grouped projection by a packed one. Mutates `weights`."""
    weights.convert_projections(packer(weights.projections(), kernels, depth))


def packer(projections: Iterable[Projection], kernels: CpuKernels, depth: DepthParts | None = None) -> Convert:
    """Return the conversion of these projections, plain or grouped, into packed ones in one arena.

    `depth`: that of plain projections whose inputs are cut among ranks; None: one segment.
    """
    arena = Arena(sum(_packed_bytes(projection, kernels) for projection in projections))

    def pack(field: str, projection: Projection) -> Projection:
        match projection:
            case Linear():
                return pack_plain(projection, kernels, arena, depth if field in CUT_BY_INPUTS else None)
            case GroupedLinear():
                return pack_grouped(projection, kernels, arena, in_tiles=_is_for_tiles(field, kernels))
            case _:
                return projection

    return pack


def pack_plain(linear: Linear, kernels: CpuKernels, arena: Arena, parts: DepthParts | None = None) -> PackedLinear:
    """Copy a weight [out_features, in_features] into the kernels' layout. in_features is even."""
    weight = linear.weight.contiguous()
    columns, depth = weight.shape
    packed = arena.allocate(kernels.packed_size(columns, depth), weight.dtype)
    kernels.pack(weight.data_ptr(), packed.data_ptr(), columns, depth)
    address = PackedWeight(packed=packed.data_ptr(), bias=_address(linear.bias), columns=columns, depth=depth)
    if parts is not None:
        address.num_segments, address.ranks = parts.num_segments, parts.ranks
    return PackedLinear(address, (packed, linear.bias), kernels)


def _is_for_tiles(field: str, kernels: CpuKernels) -> bool:
    """Whether tile registers multiply with a grouped weight; not with a head: for its few rows vectors are faster."""
    return field != HEAD_FIELD and kernels.dtype is torch.bfloat16 and kernels.has_tiles()


def pack_grouped(linear: GroupedLinear, kernels: CpuKernels, arena: Arena, *, in_tiles: bool) -> PackedLinear:
    """Copy a grouped weight into the kernels' layout: its scales in 16 bits where this changes none of them.

    `in_tiles`: for tile registers, with kernels for bfloat16 that have some.
    """
    weight = linear.weight
    columns, depth = weight.shape
    codes = arena.allocate(kernels.codes_size(columns, depth, weight.bits), torch.uint8)
    contiguous = weight.codes.contiguous()
    kernels.pack_codes(contiguous.data_ptr(), codes.data_ptr(), columns, depth, weight.bits, in_tiles)
    dtype = _grid_dtype(weight)
    scales = _pack_grid(weight.scales, dtype, arena)
    offsets = None if weight.offsets is None else _pack_grid(weight.offsets, dtype, arena)
    bias = None if linear.bias is None else linear.bias.to(kernels.dtype).contiguous()
    grouped = GroupedCodes(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        offsets=_address(offsets),
        bits=weight.bits,
        scale_bits=dtype.itemsize * 8,
        group_blocks=-(-min(weight.group_size, depth) // _BLOCK),
        in_tiles=in_tiles,
    )
    address = PackedWeight(bias=_address(bias), columns=columns, depth=depth, grouped=grouped)
    return PackedLinear(address, (codes, scales, offsets, bias), kernels)


def _packed_bytes(projection: Projection, kernels: CpuKernels) -> int:
    """Return what `pack_projections` takes of the arena for a projection."""
    match projection:
        case Linear():
            return padded(kernels.packed_size(*projection.weight.shape), projection.weight.dtype)
        case GroupedLinear():
            weight = projection.weight
            num_grids = 1 if weight.offsets is None else 2
            grid = padded(-(-weight.shape[0] // _LANES) * _LANES * weight.scales.shape[1], _grid_dtype(weight))
            return padded(kernels.codes_size(*weight.shape, weight.bits), torch.uint8) + num_grids * grid
        case _:
            return 0


def _grid_dtype(weight: GroupedWeight) -> torch.dtype:
    """Return float16 when it holds every scale and offset exactly, else float32."""
    grids = [grid for grid in (weight.scales, weight.offsets) if grid is not None]
    return torch.float16 if all(torch.equal(grid.half().float(), grid) for grid in grids) else torch.float32


def _pack_grid(grid: Tensor, dtype: torch.dtype, arena: Arena) -> Tensor:
    """Return scales or offsets [out_features, num_groups] as [panel][group][lane]; missing rows are 0."""
    rows, num_groups = grid.shape
    filled = F.pad(grid, (0, 0, 0, -rows % _LANES)).to(dtype)
    panels = filled.view(-1, _LANES, num_groups).transpose(1, 2)
    return arena.allocate(filled.numel(), dtype).copy_(panels.flatten())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
        self.num_bytes = linear.weight.nbytes
        """See `Projection`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features]."""
        num_tokens = x.shape[0]
        if num_tokens == _SLOW_ROWS:
            x = F.pad(x, (0, 0, 0, _PADDED_ROWS - _SLOW_ROWS))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x, self._weight, self._bias, "none", [], ""
        )
        return product[:num_tokens]

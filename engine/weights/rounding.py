"""Rounds weights to grids of few bits, with a search for the grid that is closest.

Scales and offsets are rounded to float16 before the codes are chosen, so that their own error cancels.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.weights.grouped import GroupedWeight, concatenate

_ELEMENTS_AT_A_TIME = 1 << 18  # they stay in the processor's cache during the search

# Factors of the grid that spans a group's values. A narrower one clips the largest, in favour of the many small ones.
_SYMMETRIC_FACTORS = {4: (1.0, 0.98, 0.95, 0.92, 0.88, 0.84, 0.8, 1.03, 1.08), 8: (1.0,)}
_AFFINE_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8)
_ZERO_POINT_FACTORS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)
_TINIEST_SCALE = 2.0**-24  # of float16
_TINIEST_SHORT_SCALE = 2.0**-20
_LARGEST_SCALE = 6e4


def round_to_grid(weight: Tensor, *, bits: int, group_size: int) -> GroupedWeight:
    """Return the symmetric grid of 4 or 8 bits closest to a weight [out_features, in_features] of any float dtype."""
    return _by_rows(weight, group_size, lambda groups: _symmetric(groups, bits), bits)


def round_to_affine_grid(weight: Tensor, *, group_size: int) -> GroupedWeight:
    """Return a grid of 4 bits with offsets, close to a weight [out_features, in_features] of any float dtype.

    A weight that lies on such a grid already, as that of a dequantized GGUF in Q4_1, keeps its values.
    """
    return _by_rows(weight, group_size, _affine, 4)


def round_to_zero_points(weight: Tensor, *, bits: int, group_size: int) -> GroupedWeight:
    """Return a grid of `fit_grid` close to a weight [out_features, in_features]; group_size divides in_features."""
    parts = []
    for rows in torch.split(weight, max(1, _ELEMENTS_AT_A_TIME // weight.shape[1])):
        groups = rows.float().reshape(-1, group_size).t()
        scale, zero = fit_grid(groups, groups.new_ones(group_size, 1), bits=bits)
        codes = grid_codes(groups, scale, zero, bits=bits).t().reshape(rows.shape)
        per_row = (len(rows), -1)
        parts.append(grouped_by_zeros(codes, scale.view(per_row), zero.view(per_row), bits, group_size))
    return concatenate(parts)


def fit_grid(values: Tensor, importance: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [rows] of grids `scale * (code - zero)` close to values [group_size, rows].

    Errors are weighed by `importance` [group_size, 1]. Zero points are codes; grids of 8 bits are symmetric. Scales of
    4-bit grids have 7 significant bits, so that float16, which the kernels prefer, holds `scale * zero`.
    """
    largest = 2**bits - 1
    low, high = values.amin(0).clamp_max_(0), values.amax(0).clamp_min_(0)
    if bits == 8:
        scale = _in_half(torch.maximum(-low, high) / (largest // 2)).clamp_min_(_TINIEST_SCALE)
        return scale, torch.full_like(low, 2 ** (bits - 1))
    best_error, best_scale, best_zero = torch.full_like(low, torch.inf), low, low
    for factor in _ZERO_POINT_FACTORS:
        scale = _in_seven_bits((high - low) * (factor / largest))
        center = (largest - (low + high) / scale) / 2
        for zero in (center.floor(), center.ceil()):
            zero.clamp_(0, largest)
            rounded = (grid_codes(values, scale, zero, bits=bits) - zero) * scale
            error = rounded.sub_(values).square_().mul_(importance).sum(0)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best_scale = torch.where(is_better, scale, best_scale)
            best_zero = torch.where(is_better, zero, best_zero)
    return best_scale, best_zero


def grid_codes(values: Tensor, scale: Tensor, zero: Tensor, *, bits: int) -> Tensor:
    """Return the codes of the nearest points of a grid, as floats."""
    return (values / scale).add_(zero).round_().clamp_(0, 2**bits - 1)


def grouped_by_zeros(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """Return the weight `scale * (code - zero)`; all of these are floats, and codes are [out_features, in_features]."""
    is_symmetric = bool((zeros == 2 ** (bits - 1)).all())
    return GroupedWeight(
        bits=bits,
        group_size=group_size,
        codes=codes.to(torch.uint8).contiguous(),
        scales=scales,
        offsets=None if is_symmetric else -(scales * zeros),
    )


_Grid = tuple[Tensor, Tensor, Tensor | None]
"""Codes [rows, groups, group_size], scales and offsets [rows, groups, 1]."""


def _by_rows(weight: Tensor, group_size: int, round_groups: Callable[[Tensor], _Grid], bits: int) -> GroupedWeight:
    rows_at_a_time = max(1, _ELEMENTS_AT_A_TIME // weight.shape[1])
    num_inputs, size = weight.shape[1], min(group_size, weight.shape[1])
    # Filled part by part: joining parts would take the memory twice.
    all_codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    all_scales = torch.empty((len(weight), -(-num_inputs // size)), device=weight.device)
    all_offsets: Tensor | None = None
    for begin in range(0, len(weight), rows_at_a_time):
        part = slice(begin, begin + rows_at_a_time)
        rows = weight[part]
        # A group at the end is filled up with its last value, which changes neither its range nor its codes.
        padded = F.pad(rows.float()[None], (0, -num_inputs % size), mode="replicate")[0]
        codes, scales, offsets = round_groups(padded.reshape(len(rows), -1, size))
        all_codes[part] = codes.flatten(1)[:, :num_inputs]
        all_scales[part] = scales.squeeze(2)
        if offsets is not None:
            all_offsets = torch.empty_like(all_scales) if all_offsets is None else all_offsets
            all_offsets[part] = offsets.squeeze(2)
    return GroupedWeight(bits=bits, group_size=group_size, codes=all_codes, scales=all_scales, offsets=all_offsets)


def _symmetric(groups: Tensor, bits: int) -> _Grid:
    middle = 2 ** (bits - 1)
    # The grid reaches further below its middle than above: the largest magnitude, with its sign, goes there.
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best_error = torch.full_like(largest, torch.inf)
    best_scale, best_codes = torch.zeros_like(largest), torch.zeros_like(groups)
    for factor in _SYMMETRIC_FACTORS[bits]:
        scale = _in_half(largest * (-factor / middle))
        codes = torch.where(scale == 0, 0, groups / scale).round_().clamp_(-middle, middle - 1)
        error = (codes * scale).sub_(groups).square_().sum(2, keepdim=True)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_codes = torch.where(is_better, codes, best_codes)
    return best_codes + middle, best_scale, None


def _affine(groups: Tensor) -> _Grid:
    best_error = groups.new_full((*groups.shape[:2], 1), torch.inf)
    best_scale, best_offset, best_codes = best_error, best_error, groups
    for scale, offset in _affine_candidates(groups):
        codes = _affine_codes(groups, scale, offset)
        error = (codes * scale).add_(offset).sub_(groups).square_().sum(2, keepdim=True)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_offset = torch.where(is_better, offset, best_offset)
        best_codes = torch.where(is_better, codes, best_codes)
    return best_codes, best_scale, best_offset


def _affine_candidates(groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and offsets in float16's precision: for each factor, the grid and one fitted to the grid's codes."""
    low, high, mean = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True), groups.mean(2, keepdim=True)
    for factor in _AFFINE_FACTORS:
        scale = _in_half((high - low) * (factor / 15)).clamp_min_(_TINIEST_SCALE)
        offset = _in_half((low + high) / 2 - 7.5 * scale)
        yield scale, offset
        codes = _affine_codes(groups, scale, offset)  # least squares of groups = scale * codes + offset
        mean_code = codes.mean(2, keepdim=True)
        spread = codes - mean_code
        fitted = (spread * (groups - mean)).sum(2, keepdim=True) / spread.square().sum(2, keepdim=True)
        scale = torch.where(fitted > _TINIEST_SCALE, _in_half(fitted), scale)  # NaN where all codes are equal
        yield scale, _in_half(mean - scale * mean_code)


def _affine_codes(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return ((groups - offset) / scale).round_().clamp_(0, 15)


def _in_half(x: Tensor) -> Tensor:
    return x.half().float()


def _in_seven_bits(x: Tensor) -> Tensor:
    """Return positive numbers rounded to 7 significant bits, within float16's range."""
    bits = x.clamp(_TINIEST_SHORT_SCALE, _LARGEST_SCALE).half().view(torch.int16)
    return (bits + 8 & ~15).view(torch.float16).float()

"""Rounds a projection so that its products on a text stay close: GPTQ (Frantar et al., arXiv:2210.17323).

Inputs are rounded one after the other. What rounding one of them changes in the products, the ones behind it make up
for as far as they are correlated with it. Then each input in turn gets the codes that are best beside those of all
others (QuantEase, Behdin et al., arXiv:2309.01885).

What is rounded is not the weight itself but the one that comes closest to the model's own results from the inputs that
the rounded model has, which differ by the errors of all projections before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.grouped import GroupedWeight, concatenate
from engine.weights.rounding import fit_grid, grid_codes, grouped_by_zeros

_BLOCK = 32
"""Inputs whose errors are handed on together; divides every group."""
_ROWS_AT_A_TIME = 768
"""Rows are independent; so many of a block stay in the processor's cache, and in one thread."""
_DAMPING = 0.01
"""Share of the mean square of an input that is added to each: what the text does not show is not taken for zero."""
_FIT_DAMPING = 0.05
"""The same for the weight to be rounded, which would otherwise learn the text by heart."""


_TINIEST_DAMPING = 1e-6
_SWEEPS = 2


@dataclass(frozen=True, slots=True)
class TextSums:
    """Sums over the tokens of a text: of the inputs x of a rounded model's projection, and of the results y wanted."""

    moments: Tensor
    """x^T x, float32 [in_features, in_features]."""
    products: Tensor
    """y^T x, float32 [out_features, in_features]."""

    @classmethod
    def zero(cls, shape: tuple[int, int]) -> "TextSums":
        """Return the sums over nothing, for a weight of this shape."""
        return cls(torch.zeros(shape[1], shape[1]), torch.zeros(shape))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add tokens: x [num_tokens, in_features] and y [num_tokens, out_features], without bias. Mutates the sums."""
        wide = x.float()
        self.moments.addmm_(wide.t(), wide)
        self.products.addmm_(y.float().t(), wide)


def round_for_text(weight: Tensor, sums: TextSums, *, bits: int, group_size: int) -> GroupedWeight:
    """Return the weight [out_features, in_features] on grids of `fit_grid` whose results on the text are close."""
    fitted = _fitted(weight, sums)
    damped, _ = _damped(sums.moments, _DAMPING)
    # Row i says how the inputs behind input i compensate for a change of it, once those before it are fixed.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    chain = torch.linalg.cholesky(inverse, upper=True).float()
    moments = damped.float()
    return concatenate(
        [
            _round_rows(rows.contiguous(), chain, moments, bits=bits, group_size=group_size)
            for rows in torch.split(fitted, _ROWS_AT_A_TIME, dim=1)
        ]
    )


def _fitted(weight: Tensor, sums: TextSums) -> Tensor:
    """Return the weight whose results are closest to those wanted, and near `weight`, as [in_features, rows]."""
    damped, damping = _damped(sums.moments, _FIT_DAMPING)
    wanted = sums.products.double() + damping * weight.double()
    return torch.cholesky_solve(wanted.t(), torch.linalg.cholesky(damped)).float()


def _damped(moments: Tensor, share: float) -> tuple[Tensor, float]:
    damped = moments.double()
    damping = max(share * float(damped.diagonal().mean()), _TINIEST_DAMPING)
    damped.diagonal().add_(damping)
    return damped, damping


def _round_rows(wanted: Tensor, chain: Tensor, moments: Tensor, *, bits: int, group_size: int) -> GroupedWeight:
    """Round the values [in_features, rows] of some outputs."""
    values, importance = wanted.clone(), moments.diagonal()
    codes, scales, zeros = torch.empty_like(values), [], []
    for begin in range(0, len(values), _BLOCK):
        end = min(begin + _BLOCK, len(values))
        if begin % group_size == 0:
            group = slice(begin, begin + group_size)
            scale, zero = fit_grid(values[group], importance[group, None], bits=bits)
            scales.append(scale)
            zeros.append(zero)
        block, errors = values[begin:end], torch.empty(end - begin, values.shape[1])
        for i, value in enumerate(block):
            links = chain[begin + i, begin + i : end]
            code = grid_codes(value, scale, zero, bits=bits)
            codes[begin + i] = code
            errors[i] = (value - (code - zero) * scale) / links[0]
            block[i + 1 :].addr_(links[1:], errors[i], alpha=-1)
        values[end:].addmm_(chain[begin:end, end:].t(), errors, alpha=-1)
    scale, zero = torch.stack(scales), torch.stack(zeros)
    for _ in range(_SWEEPS):
        _refine(
            codes, wanted, moments, scale.repeat_interleave(group_size, 0), zero.repeat_interleave(group_size, 0), bits
        )
    return grouped_by_zeros(codes.t(), scale.t().contiguous(), zero.t().contiguous(), bits, group_size)


def _refine(codes: Tensor, wanted: Tensor, moments: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> None:
    """Give each input the codes that are best beside those of all others; everything is [in_features, rows]."""
    errors = (codes - zeros) * scales - wanted
    for begin in range(0, len(codes), _BLOCK):
        end = min(begin + _BLOCK, len(codes))
        slopes = moments[begin:end] @ errors
        for i, slope in enumerate(slopes, begin):
            best = wanted[i] + errors[i] - slope / moments[i, i]
            code = grid_codes(best, scales[i], zeros[i], bits=bits)
            change = (code - codes[i]) * scales[i]
            codes[i] = code
            errors[i] += change
            slopes.addr_(moments[begin:end, i], change)

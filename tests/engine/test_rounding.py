"""Weights rounded to grids of 4 and 8 bits: what it costs, and what it must not change."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.weights.grouped import GroupedWeight
from engine.weights.rounding import round_to_affine_grid, round_to_grid
from tests.engine.checkpoints.packers import make_weight

Rounding = Callable[[Tensor], GroupedWeight]
GRIDS: dict[str, Rounding] = {
    "8 bits": partial(round_to_grid, bits=8, group_size=32),
    "4 bits": partial(round_to_grid, bits=4, group_size=32),
    "4 bits with offsets": partial(round_to_affine_grid, group_size=32),
}


def values(weight: GroupedWeight) -> Tensor:
    return weight.dequantize(torch.float32)


def make_plain(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def plain_error(weight: Tensor) -> float:
    """Return the mean squared error of the grid of 16 values whose scale is that of the largest magnitude."""
    groups = weight.reshape(len(weight), -1, 32)
    scale = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    return float(((groups / scale).round().clamp(-8, 7) * scale - groups).square().mean())


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_on_a_symmetric_grid_keep_their_values(bits: int) -> None:
    weight = make_weight(bits, 8, 64, 32, has_offsets=False)
    weight.scales.copy_(weight.scales.half().float())
    weight.codes[:, ::32] = 0  # the end of the grid, by which its scale is found
    assert torch.equal(values(round_to_grid(values(weight), bits=bits, group_size=32)), values(weight))


def test_weights_of_a_dequantized_4_bit_checkpoint_keep_their_values() -> None:
    weight = make_weight(4, 8, 64, 32, has_offsets=True)
    for grid in (weight.scales, weight.offsets):
        assert grid is not None
        grid.copy_(grid.half().float())
    weight.codes[:, ::32], weight.codes[:, 1::32] = 0, 15
    found = round_to_affine_grid(values(weight), group_size=32)
    torch.testing.assert_close(values(found), values(weight), atol=1e-3, rtol=1e-3)
    assert torch.equal(found.codes, weight.codes)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    columns=st.sampled_from([32, 64, 70]),
    exponent=st.integers(-3, 3),
    grid=st.sampled_from(list(GRIDS)),
)
def test_rounding_costs_at_most_half_a_step_of_a_group_on_average(
    seed: int, columns: int, exponent: int, grid: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, columns, generator=generator) * 10.0**exponent
    found = GRIDS[grid](weight)
    assert int(found.codes.max()) < 2**found.bits
    error = F.pad(values(found) - weight, (0, -columns % 32)).reshape(5, -1, 32)
    padded = F.pad(weight, (0, -columns % 32)).reshape(5, -1, 32)
    step = padded.abs().amax(2) / 2 ** (found.bits - 1)
    # The search may clip the largest value, but only where the sum of squares becomes smaller by it.
    assert (error.square().sum(2) <= 32 * (step * 0.501).square() + step.square() * 1.01).all()


def test_search_of_scales_makes_the_error_of_4_bits_smaller() -> None:
    weight = make_plain(64, 256)
    symmetric, affine = (
        float((values(GRIDS[grid](weight)) - weight).square().mean()) for grid in ("4 bits", "4 bits with offsets")
    )
    assert affine < 0.85 * symmetric
    assert symmetric < 0.9 * plain_error(weight)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_row_of_one_value_stays_as_it_is(grid: str) -> None:
    weight = make_plain(3, 64)
    weight[1], weight[2] = 0, 0.5
    found = values(GRIDS[grid](weight))
    assert found[1].eq(0).all()
    torch.testing.assert_close(found[2], weight[2], atol=0.005, rtol=0)
    assert found.isfinite().all()


def test_a_last_group_that_is_not_full_is_rounded_like_a_full_one() -> None:
    weight = make_plain(4, 40)
    for rounded in GRIDS.values():
        error = (values(rounded(weight)) - weight).abs()
        assert error[:, 32:].max() <= 0.6 * weight.abs().max() / 8

"""The layout of weights in 4 and 8 bits."""

import pytest
import torch
from torch.nn import functional as F

from engine.model.grouped import GroupedLinear, GroupedWeight, concatenate


def make_weight(bits: int, rows: int, columns: int, group_size: int, *, has_offsets: bool) -> GroupedWeight:
    generator = torch.Generator().manual_seed(rows * columns + bits)
    grid = (rows, -(-columns // group_size))
    return GroupedWeight(
        bits=bits,
        group_size=group_size,
        codes=torch.randint(0, 2**bits, (rows, columns), generator=generator).to(torch.uint8),
        scales=torch.rand(grid, generator=generator),
        offsets=torch.randn(grid, generator=generator) if has_offsets else None,
    )


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize(("bits", "columns", "group_size"), [(4, 64, 32), (8, 96, 96), (4, 70, 32)])
def test_a_value_is_its_code_times_the_scale_of_its_group(
    bits: int, columns: int, group_size: int, has_offsets: bool
) -> None:
    weight = make_weight(bits, 3, columns, group_size, has_offsets=has_offsets)
    values = weight.dequantize(torch.float32)
    for row in range(3):
        for column in range(columns):
            scale = float(weight.scales[row, column // group_size])
            offset = -(2 ** (bits - 1)) * scale
            if weight.offsets is not None:
                offset = float(weight.offsets[row, column // group_size])
            assert values[row, column] == pytest.approx(scale * int(weight.codes[row, column]) + offset, abs=1e-5)


@pytest.mark.parametrize("has_offsets", [False, True])
def test_concatenated_weights_have_the_rows_of_all_parts(has_offsets: bool) -> None:
    parts = [make_weight(4, 3, 64, 32, has_offsets=has_offsets), make_weight(4, 5, 64, 32, has_offsets=False)]
    values = torch.cat([part.dequantize(torch.float32) for part in parts])
    torch.testing.assert_close(concatenate(parts).dequantize(torch.float32), values, atol=1e-5, rtol=1e-5)


def test_grouped_linear_equals_a_plain_one_of_its_values() -> None:
    weight, bias, x = make_weight(4, 6, 64, 32, has_offsets=True), torch.randn(6), torch.randn(2, 64)
    expected = F.linear(x, weight.dequantize(torch.float32), bias)
    assert torch.equal(GroupedLinear(weight, bias)(x), expected)

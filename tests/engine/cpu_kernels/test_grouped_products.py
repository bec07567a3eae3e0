"""Products with weights in 4 and 8 bits against torch, and the bits of a row among other rows."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.cpu.build import NotBuilt, build_kernels
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import Arena, PackedLinear, pack_grouped
from engine.weights.grouped import GroupedLinear, RoundedInputs, input_span
from engine.weights.precision import cpu_has
from tests.engine.checkpoints.packers import make_weight


def make_linear(
    bits: int, out_features: int, in_features: int, group_size: int, *, has_offsets: bool, has_half_scales: bool = True
) -> GroupedLinear:
    weight = make_weight(bits, out_features, in_features, group_size, has_offsets=has_offsets)
    if has_half_scales:
        for grid in (weight.scales, weight.offsets):
            if grid is not None:
                grid.copy_(grid.half().float())
    return GroupedLinear(weight, torch.randn(out_features, generator=torch.Generator().manual_seed(1)))


def has_tiles(kernels: CpuKernels) -> bool:
    return kernels.dtype is torch.bfloat16 and kernels.has_tiles()


def pack(linear: GroupedLinear, kernels: CpuKernels, *, is_head: bool = False) -> PackedLinear:
    return pack_grouped(linear, kernels, Arena(4 << 20), in_tiles=has_tiles(kernels) and not is_head)


def make_inputs(num_tokens: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, in_features, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)


def rounded_in_spans(x: Tensor, span: int) -> Tensor:
    """Return x as the kernels round it: to 255 steps of each span of inputs, float64."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % span)).reshape(len(x), -1, span)
    largest = blocks.abs().amax(2, keepdim=True)
    codes = (blocks.double() * (127 / largest).double()).round()
    rounded: Tensor = (codes * (largest / 127).double()).flatten(1)[:, : x.shape[1]]
    return rounded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size", "span", "has_half_scales"),
    [
        (1, 64, 32, 32, True),
        (33, 96, 64, 32, False),
        (48, 70, 32, 32, True),
        (17, 416, 128, 32, False),
        (40, 70, 70, 128, True),
        (20, 416, 416, 128, False),
    ],
)
def test_product_equals_that_of_the_values_with_rounded_inputs(
    kernels: CpuKernels,
    out_features: int,
    in_features: int,
    group_size: int,
    span: int,
    has_half_scales: bool,
    bits: int,
    has_offsets: bool,
) -> None:
    linear = make_linear(
        bits, out_features, in_features, group_size, has_offsets=has_offsets, has_half_scales=has_half_scales
    )
    packed = pack(linear, kernels)
    assert linear.bias is not None
    bias = linear.bias.to(kernels.dtype).double()
    values = linear.weight.dequantize(torch.float64)
    for num_tokens in (1, 2, 12, 25):
        x = make_inputs(num_tokens, in_features, kernels.dtype)
        expected = F.linear(rounded_in_spans(x, span), values, bias)
        bound = torch.full_like(expected, 2e-5 * in_features) + 1e-4 * expected.abs()
        if kernels.dtype is torch.bfloat16:
            # bfloat16 inputs often lie halfway between two codes, where two processors may choose differently. In tiles
            # rounded inputs and weights are bfloat16, with 8 bits each.
            bound += 2 * float(x.abs().max()) / 127 * float(values.abs().max())
            bound += 2**-8 * F.linear(x.double().abs(), values.abs()) * has_tiles(kernels)
        assert ((packed.wide(x).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("in_features", "group_size"), [(64, 32), (70, 32), (300, 300)])
def test_product_without_these_kernels_rounds_inputs_in_the_same_way(
    float32_kernels: CpuKernels, in_features: int, group_size: int
) -> None:
    linear = make_linear(4, 24, in_features, group_size, has_offsets=True)
    sizes = torch.logspace(-3, 3, 9)[:, None]
    x = make_inputs(9, in_features, torch.float32) * sizes
    x[4] = 0
    x[5, :32] = 1e-38
    found = RoundedInputs(linear.dequantize(torch.float32), input_span(group_size, in_features))(x)
    assert linear.bias is not None
    bias, expected = linear.bias.float(), pack(linear, float32_kernels).wide(x)
    torch.testing.assert_close((found - bias) / sizes, (expected - bias) / sizes, atol=1e-3, rtol=1e-3)
    assert torch.equal(found[4], linear.dequantize(torch.float32)(x[4:5])[0]), "zeros stay zeros"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("group_size", [64, 608])
@pytest.mark.parametrize("is_head", [False, True])
def test_product_when_other_rows_change_keeps_its_bits(
    kernels: CpuKernels, bits: int, group_size: int, has_offsets: bool, is_head: bool
) -> None:
    packed = pack(make_linear(bits, 70, 608, group_size, has_offsets=has_offsets), kernels, is_head=is_head)
    x = make_inputs(40, 608, kernels.dtype)
    alone = torch.cat([packed(row[None]) for row in x])
    assert packed(x[:0]).shape == (0, 70)
    # From 7 rows on several threads round them; beyond 32 weights are a tile's right operand.
    for num_tokens in (2, 7, 8, 13, 17, 32, 33, 40):
        assert torch.equal(packed(x[:num_tokens]), alone[:num_tokens])


@pytest.mark.skipif(not cpu_has("amx_int8"), reason="needs a processor with tile registers for 8 bits")
def test_many_rows_are_multiplied_in_tiles_where_there_are_some() -> None:
    built = build_kernels()
    if isinstance(built, NotBuilt):
        pytest.skip(built.reason)
    kernels = CpuKernels(built, torch.bfloat16)
    assert kernels.has_tiles()
    # oneDNN keeps a layout of the registers in each thread, and trusts that it stays.
    packed, x = pack(make_linear(4, 70, 608, 32, has_offsets=True), kernels), make_inputs(40, 608, torch.bfloat16)
    weight = torch.ones(64, 608, dtype=torch.bfloat16)
    expected = F.linear(x, weight)
    for _ in range(3):
        packed(x)
        assert torch.equal(F.linear(x, weight), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_product_when_a_row_is_not_finite_leaves_the_others(kernels: CpuKernels, bad: float) -> None:
    packed = pack(make_linear(4, 40, 64, 32, has_offsets=False), kernels)
    x = make_inputs(3, 64, kernels.dtype)
    expected = packed(x)
    x[1, 5] = bad
    found = packed(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("largest", [0.0, 1e-38, 3e38])
def test_product_of_tiny_and_of_huge_inputs_is_a_number(kernels: CpuKernels, largest: float) -> None:
    linear = make_linear(8, 16, 64, 32, has_offsets=False)
    linear.weight.scales.fill_(1e-4)
    x = torch.zeros(1, 64).to(kernels.dtype)
    x[0, 3] = largest
    found = pack(linear, kernels).wide(x)
    assert linear.bias is not None
    expected = linear.weight.dequantize(torch.float32)[:, 3] * largest + linear.bias.to(kernels.dtype)
    torch.testing.assert_close(found[0], expected, rtol=0.01, atol=1e-6)

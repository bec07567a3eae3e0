"""Packed projections against torch."""

import pytest
import torch

from engine.model.weights import Linear
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import Arena, PackedLinear


def make_linear(out_features: int, in_features: int, dtype: torch.dtype) -> Linear:
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    return Linear(
        weight=torch.randn(out_features, in_features, generator=generator).to(dtype),
        bias=torch.randn(out_features, generator=generator).to(dtype),
    )


def pack(linear: Linear, kernels: CpuKernels) -> PackedLinear:
    return PackedLinear(linear, kernels, Arena(4 << 20))


@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 31, 32, 33, 48, 64, 100])
@pytest.mark.parametrize("in_features", [2, 30, 64, 66])
def test_product_equals_torch(kernels: CpuKernels, out_features: int, in_features: int) -> None:
    linear = make_linear(out_features, in_features, kernels.dtype)
    for num_tokens in (1, 2, 3, 11, 12, 13, 25):
        x = torch.randn(num_tokens, in_features).to(kernels.dtype)
        assert linear.bias is not None
        expected = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        atol, rtol = (1e-4, 1e-5) if kernels.dtype is torch.float32 else (0.1, 1e-2)
        torch.testing.assert_close(pack(linear, kernels)(x).double(), expected, atol=atol, rtol=rtol)


def test_product_when_other_rows_change_keeps_its_bits(kernels: CpuKernels) -> None:
    packed = pack(make_linear(70, 96, kernels.dtype), kernels)
    x = torch.randn(40, 96).to(kernels.dtype)
    alone = torch.cat([packed(row[None]) for row in x])
    for num_tokens in (2, 7, 13, 40):
        assert torch.equal(packed(x[:num_tokens]), alone[:num_tokens])


def test_product_when_a_row_is_not_finite_leaves_the_others(kernels: CpuKernels) -> None:
    packed = pack(make_linear(40, 64, kernels.dtype), kernels)
    x = torch.randn(3, 64).to(kernels.dtype)
    expected = packed(x)
    x[1, 5] = float("nan")
    found = packed(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_arena_when_asked_for_pieces_gives_aligned_ones_that_do_not_overlap() -> None:
    arena = Arena(3 * 64 + 128)
    pieces = [arena.allocate(count, torch.bfloat16) for count in (1, 32, 31, 64)]
    for i, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(i)
    assert [set(piece.tolist()) for piece in pieces] == [{0.0}, {1.0}, {2.0}, {3.0}]

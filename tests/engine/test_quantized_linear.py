"""Products and values in 8 bits: small errors in every channel, zeros that stay zero, and nothing that overflows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.weights.decoder_weights import Linear
from engine.weights.quantize import FP8, FP8_MAX, Fp8Linear, Int8Linear, quantize_rows_in_torch, round_to_fp8

Kind = Callable[[Linear], Callable[[Tensor], Tensor]]


def make_linear(num_out: int, num_in: int, dtype: torch.dtype, *, has_bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(0)
    # Rows of very different size: a common scale would lose the small ones.
    sizes = torch.logspace(-3, 1, num_out)[:, None]
    weight = (torch.randn(num_out, num_in, generator=generator) * sizes).to(dtype)
    bias = torch.randn(num_out, generator=generator).to(dtype) if has_bias else None
    return Linear(weight=weight, bias=bias)


def channel_errors(found: Tensor, x: Tensor, linear: Linear) -> Tensor:
    """Return each channel's error relative to the norms of inputs and weights."""
    bias = linear.bias.double() if linear.bias is not None else None
    error = found.double() - F.linear(x.double(), linear.weight.double(), bias)
    norms: Tensor = torch.linalg.vector_norm(error, dim=0)
    sizes: Tensor = x.double().norm() * torch.linalg.vector_norm(linear.weight.double(), dim=1)
    return norms / sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_int8_linear_is_close_in_every_channel(num_tokens: int, dtype: torch.dtype) -> None:
    linear = make_linear(48, 64, dtype)
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = Int8Linear(linear)(x)
    assert (found.dtype, found.shape) == (dtype, (num_tokens, 48))
    assert channel_errors(found, x, linear).max() < 0.02
    assert channel_errors(found, x, linear).mean() < 0.007, "half a step of 1/127 of the largest weight"


@pytest.mark.parametrize("num_tokens", [1, 8, 9])
@pytest.mark.parametrize("kind", [Fp8Linear, Int8Linear])
def test_linear_with_a_bias_adds_it(kind: Kind, num_tokens: int) -> None:
    linear = make_linear(48, 64, torch.float32, has_bias=True)
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1))
    without = kind(Linear(weight=linear.weight, bias=None))(x)
    assert linear.bias is not None
    assert torch.equal(kind(linear)(x), without + linear.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_linear_multiplies_rounded_activations_with_rounded_weights(dtype: torch.dtype) -> None:
    linear = make_linear(48, 64, dtype)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, 7)[:, None]
    x = x.to(dtype)
    quantized = Fp8Linear(linear)
    found = quantized(x)
    rows, scales = quantize_rows_in_torch(x)
    rounded = Linear(weight=quantized.weight.double() * quantized.scale.double(), bias=None)
    assert found.dtype is dtype
    assert channel_errors(found, rows.double() * scales.double(), rounded).max() < (
        1e-6 if dtype.itemsize == 4 else 4e-3
    )
    assert 0.001 < channel_errors(found, x, linear).mean() < 0.02, "e4m3 has three bits of mantissa, on both sides"


def test_fp8_linear_holds_only_values_of_e4m3() -> None:
    weight = Fp8Linear(make_linear(48, 64, torch.bfloat16)).weight
    assert torch.equal(weight.to(FP8).to(weight.dtype), weight)
    assert weight.abs().amax(1).eq(FP8_MAX).all(), "each channel uses the whole range"


@pytest.mark.parametrize("kind", [Fp8Linear, Int8Linear])
def test_linear_with_a_row_of_zeros_returns_zero_there(kind: Kind) -> None:
    weight = torch.ones(32, 32)
    weight[5] = 0
    found = kind(Linear(weight=weight, bias=None))(torch.ones(2, 32))
    assert found[:, 5].eq(0).all()
    assert torch.allclose(found[:, :5], torch.tensor(32.0), rtol=1e-2)


def test_quantize_rows_of_zeros_and_of_huge_values_stays_finite() -> None:
    x = torch.tensor([[0.0, 0.0], [3e38, -1e38], [1e-30, 0.0]])
    rows, scales = quantize_rows_in_torch(x)
    assert torch.isfinite(rows.float()).all()
    assert torch.allclose(rows.float() * scales, x, rtol=0.07)


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
def test_round_to_fp8_keeps_16_steps_per_octave_and_saturates(scale: float) -> None:
    x = torch.tensor([0.0, 1.0, 1.0625, -1.125, 448.0, 1e6, -1e6]) * scale
    rounded = round_to_fp8(x, scale)
    assert rounded.tolist() == [value * scale for value in (0.0, 1.0, 1.0, -1.125, 448.0, 448.0, -448.0)]


def test_round_to_fp8_changes_nothing_the_second_time() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    once = round_to_fp8(x, 0.5)
    assert torch.equal(round_to_fp8(once, 0.5), once)
    assert torch.equal((once / 0.5).to(FP8).to(torch.bfloat16) * 0.5, once), "bfloat16 holds what e4m3 pages hold"

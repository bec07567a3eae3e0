import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.triton_kernels.elementwise import add_rms_norm, rms_norm, silu_mul
from tests.engine.triton_kernels.support import assert_close

_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _random(device: torch.device, dtype: torch.dtype, *sizes: int, seed: int) -> Tensor:
    return (3 * torch.randn(sizes, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm as checkpoints' own implementations round it: before the weight as well."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=1e-5).to(x.dtype) * weight


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 576, 1024, 4100])
def test_rms_norm_of_any_size_equals_reference(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = _random(device, dtype, 3, size, seed=0), _random(device, dtype, size, seed=1)
    assert_close(rms_norm(x, weight, 1e-5), _normed(x, weight))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("size", [1, 60, 576, 4096])
def test_add_rms_norm_of_any_size_updates_residual_as_reference(
    size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = _random(device, dtype, 3, size, seed=0), _random(device, dtype, 3, size, seed=1)
    weight, expected_residual = _random(device, dtype, size, seed=2), residual + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, expected_residual)
    assert_close(normed, _normed(expected_residual, weight))


def test_rms_norm_of_zeros_is_zero(device: torch.device) -> None:
    normed = rms_norm(torch.zeros(2, 60, device=device), torch.ones(60, device=device), 1e-6)
    assert not normed.any()


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 1536])
def test_silu_mul_of_any_size_equals_reference(size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = _random(device, dtype, 3, 2 * size, seed=0)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(silu_mul(gate_up), F.silu(gate) * up)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
def test_silu_mul_of_large_gates_is_finite(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 2.0]], device=device)
    assert silu_mul(gate_up).tolist() == [[0.0, 2e4]]

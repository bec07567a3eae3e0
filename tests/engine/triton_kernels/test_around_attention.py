"""The kernels around attention against their references."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.device.interpreter import is_interpreted
from engine.ops.torch_ops import activate
from engine.ops.triton_kernels.elementwise import (
    add_rms_norm,
    add_rms_norm_fp8,
    gate_mul,
    gate_mul_fp8,
    rms_norm,
    rms_norm_fp8,
)
from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.rope_kv_write import HeadNorms, rope_kv_write, rotation_table
from engine.weights.architectures import Activation
from engine.weights.kernels import quantize_rows
from engine.weights.rope import RotaryEmbedding, rotate
from engine.weights.rope_config import RopeConfig, RopeType
from tests.engine.triton_interpreter import MANY_TOKENS
from tests.engine.triton_kernels import reference
from tests.engine.triton_kernels.support import TOLERANCE, Case, assert_close, bits, padded

GATES = [each for each in Activation if each.has_gate]
_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _random(device: torch.device, dtype: torch.dtype, *sizes: int, seed: int) -> Tensor:
    return (3 * torch.randn(sizes, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm with the rounding of the checkpoints' own implementations: also before the weight."""
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


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 1536])
@pytest.mark.parametrize("activation", GATES)
def test_gate_mul_of_any_size_equals_reference(
    size: int, dtype: torch.dtype, device: torch.device, activation: Activation
) -> None:
    gate_up = _random(device, dtype, 3, 2 * size, seed=0)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(gate_mul(gate_up, activation), activate(gate, activation) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 60, 576])
def test_operations_in_8_bits_equal_the_operation_and_the_rounding_after_it(
    size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = _random(device, dtype, 3, size, seed=0), _random(device, dtype, 3, size, seed=1)
    weight, gate_up = _random(device, dtype, size, seed=2), _random(device, dtype, 3, 2 * size, seed=3)
    x[1], gate_up[1] = 0, 0
    sums = residual.clone()
    found = [
        rms_norm_fp8(x, weight, 1e-5),
        add_rms_norm_fp8(x, residual, weight, 1e-5),
        gate_mul_fp8(gate_up, Activation.SILU),
    ]
    expected = [rms_norm(x, weight, 1e-5), add_rms_norm(x, sums, weight, 1e-5), gate_mul(gate_up, Activation.SILU)]
    assert torch.equal(residual, sums)
    for rows, plain in zip(found, expected, strict=True):
        values, scales = quantize_rows(plain)
        assert torch.equal(bits(rows.values), bits(values))
        assert torch.equal(rows.scales, scales)
        assert rows.dtype == dtype


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
@pytest.mark.parametrize("activation", GATES)
def test_gate_mul_of_large_gates_is_finite(device: torch.device, activation: Activation) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 2.0]], device=device)
    assert gate_mul(gate_up, activation).tolist() == [[0.0, 2e4]]


_ROPE = RopeConfig(rope_type=RopeType.YARN, theta=100.0, factor=4.0, original_max_position_embeddings=64)


def _rotations(head_dim: int, device: torch.device) -> Tensor:
    return rotation_table(RotaryEmbedding(_ROPE, head_dim=head_dim, device=device), 256, device=device)


def _norms(case: Case, device: torch.device) -> HeadNorms:
    generator = torch.Generator().manual_seed(5)
    query, key = (1 + torch.randn(2, case.head_dim, generator=generator)).to(device, case.dtype)
    return HeadNorms(query=query.contiguous(), key=key.contiguous(), eps=1e-6)


def _copy(pages: LayerPages) -> LayerPages:
    return replace(pages, keys=pages.keys.clone(), values=pages.values.clone())


def _check(case: Case, device: torch.device, norms: HeadNorms | None) -> None:
    qkv, pages, rotations, step = (
        case.qkv(device),
        case.pages(device),
        _rotations(case.head_dim, device),
        case.step(device),
    )
    expected_pages = _copy(pages)
    query = rope_kv_write(qkv, norms, rotations, pages, step)
    assert_close(query, reference.rope_kv_write(qkv, norms, rotations, expected_pages, step))
    # A step of float8's three mantissa bits is up to an eighth.
    tolerance = 0.13 if pages.keys.dtype == torch.float8_e4m3fn else TOLERANCE[case.dtype]
    for cache, expected in ((pages.keys, expected_pages.keys), (pages.values, expected_pages.values)):
        assert torch.equal(cache.float().isnan(), expected.float().isnan())
        assert_close(cache.float().nan_to_num().to(case.dtype), expected.float().nan_to_num(), tolerance=tolerance)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "has_norms"),
    [
        *((head_dim, torch.float32, has_norms) for head_dim in (2, 24, 128) for has_norms in (False, True)),
        *((24, dtype, has_norms) for dtype in (torch.float16, torch.bfloat16) for has_norms in (False, True)),
    ],
)
def test_rope_kv_write_of_head_sizes_equals_reference(
    head_dim: int, dtype: torch.dtype, has_norms: bool, device: torch.device
) -> None:
    case = Case(spans=[(30, 1), (100, 4)], head_dim=head_dim, dtype=dtype)
    _check(case, device, _norms(case, device) if has_norms else None)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (8, 1)])
@pytest.mark.parametrize("num_new", [1, 3, MANY_TOKENS])
def test_rope_kv_write_of_head_groups_and_batch_sizes_equals_reference(
    num_new: int, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    case = Case(spans=[(5, num_new)], num_heads=num_heads, num_kv_heads=num_kv_heads)
    _check(case, device, _norms(case, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_kv_write_to_float8_pages_divides_by_scales(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(
        spans=[(0, 1)] * 9, dtype=dtype, page_dtype=torch.float8_e4m3fn, key_scale=0.25, value_scale=2.0, head_dim=64
    )
    pages, step = case.pages(device), case.step(device)
    stored = torch.randn(9, 2, 2, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.float8_e4m3fn)
    scaled = stored.to(dtype) * torch.tensor([0.25, 2.0], device=device, dtype=dtype)[:, None, None]
    qkv = torch.cat((case.qkv(device)[:, :4], scaled.flatten(1, 2)), dim=1)
    no_rotation = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1).to(device)
    rope_kv_write(qkv, None, no_rotation, pages, step)
    for cache, expected in ((pages.keys, stored[:, 0]), (pages.values, stored[:, 1])):
        assert torch.equal(cache.float().flatten(0, 1)[step.slot_mapping], expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_kv_write_to_float8_pages_equals_reference(dtype: torch.dtype, device: torch.device) -> None:
    if is_interpreted():
        pytest.skip("the interpreter loses the carry where it rounds up to a power of two in float8")
    case = Case(spans=[(30, 1), (0, 9)], head_dim=64, dtype=dtype, page_dtype=torch.float8_e4m3fn, key_scale=0.25)
    _check(case, device, _norms(case, device))


def test_rope_kv_write_of_large_values_to_float8_pages_saturates(device: torch.device) -> None:
    case = Case(spans=[(0, 3)], page_dtype=torch.float8_e4m3fn, value_scale=1e-4)
    pages, step = case.pages(device), case.step(device)
    rope_kv_write(case.qkv(device), None, _rotations(case.head_dim, device), pages, step)
    stored = pages.values.float().flatten(0, 1)[step.slot_mapping]
    assert stored.isfinite().all()
    assert stored.abs().max() == 448


def test_rope_kv_write_of_padding_tokens_writes_nothing(device: torch.device) -> None:
    case = Case(spans=[(3, 1), (8, 1)])
    step = padded(case.step(device), 4)
    pages, qkv = case.pages(device), torch.randn(4, 8, case.head_dim, device=device)
    expected = _copy(pages)
    rotations = _rotations(case.head_dim, device)
    rope_kv_write(qkv, None, rotations, pages, step)
    reference.rope_kv_write(qkv, None, rotations, expected, step)
    slots = torch.ones(pages.keys[..., 0, 0].numel(), dtype=torch.bool, device=device)
    slots[step.slot_mapping[:2]] = False
    for cache, expected_cache in ((pages.keys, expected.keys), (pages.values, expected.values)):
        others = cache.flatten(0, 1)[slots], expected_cache.flatten(0, 1)[slots]
        assert torch.equal(bits(others[0]), bits(others[1]))


def test_rotation_table_turns_heads_as_rotary_embedding(device: torch.device) -> None:
    rope = RotaryEmbedding(_ROPE, head_dim=24, device=device)
    positions = torch.tensor([0, 1, 17, 255], device=device)
    heads = torch.randn(4, 2, 24, device=device)
    cos, sin = _rotations(24, device)[positions, None].chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert_close(turned, rotate(heads, *rope.angles(positions, torch.float32)))

"""The kernels for pages and 8-bit weights against plain torch, in the interpreter or on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device.kv_copy import move_blocks_in_torch
from engine.weights.quantize import FP8_MAX, quantize_rows_in_torch
from tests.engine.cuda_kv.support import DEVICE

pytest.importorskip("triton")

from engine.device.move_blocks import move_blocks
from engine.weights.kernels import int8_linear, quantize_rows


@settings(max_examples=20, deadline=None)
@given(
    num_words=st.sampled_from([1, 7, 1023, 1024, 1025]),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
    ids=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=6, unique_by=lambda pair: pair[1]),
)
def test_move_blocks_of_every_word_equals_torch(num_words: int, dtype: torch.dtype, ids: list[tuple[int, int]]) -> None:
    def blocks(num_blocks: int) -> torch.Tensor:
        return torch.arange(num_blocks * num_words).to(dtype).view(num_blocks, num_words).to(DEVICE)

    source, target = blocks(4) + 1, blocks(6)
    source_ids = torch.tensor([pair[0] for pair in ids], dtype=torch.int64, device=DEVICE)
    target_ids = torch.tensor([pair[1] for pair in ids], dtype=torch.int64, device=DEVICE)
    expected = target.clone()
    move_blocks_in_torch(source, source_ids, expected, target_ids)
    move_blocks(source, source_ids, target, target_ids)
    assert torch.equal(target, expected)


def random_values(*sizes: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_features"), [(1, 1), (1, 576), (3, 60), (5, 513)])
def test_quantize_rows_of_e4m3_values_restores_them(num_tokens: int, num_features: int, dtype: torch.dtype) -> None:
    values = random_values(num_tokens, num_features, dtype=torch.float32).mul(8).to(torch.float8_e4m3fn).to(dtype)
    values[:, 0] = -FP8_MAX
    factors = 2.0 ** torch.arange(num_tokens, device=DEVICE)[:, None]
    rows, scales = quantize_rows(values * factors.to(dtype))
    assert torch.equal(scales, factors)
    assert torch.equal(rows.to(dtype), values)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter loses the carry where it rounds up to a power of two")
def test_quantize_rows_of_any_values_equals_torch() -> None:
    x = random_values(7, 4096)
    rows, scales = quantize_rows(x)
    expected_rows, expected_scales = quantize_rows_in_torch(x)
    assert torch.equal(scales, expected_scales)
    different = rows.view(torch.uint8) != expected_rows.view(torch.uint8)
    assert different.float().mean() < 1e-3, "only ties may turn, where the two divide differently"


def test_quantize_rows_of_a_part_of_a_wider_tensor_reads_that_part() -> None:
    wide = random_values(4, 96)
    rows, scales = quantize_rows(wide[:, :32])
    expected_rows, expected_scales = quantize_rows(wide[:, :32].contiguous())
    assert torch.equal(rows.view(torch.uint8), expected_rows.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_quantize_rows_of_zeros_restores_zeros() -> None:
    rows, scales = quantize_rows(torch.zeros(2, 40, dtype=torch.bfloat16, device=DEVICE))
    assert torch.equal(rows.float() * scales, torch.zeros(2, 40, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "num_in", "num_out"),
    [(1, 128, 32), (3, 60, 72), (17, 129, 33), (64, 40, 31), (65, 40, 31), (129, 129, 65), (256, 128, 64)],
)
def test_int8_linear_equals_torch(num_tokens: int, num_in: int, num_out: int, dtype: torch.dtype) -> None:
    x, scale = random_values(num_tokens, num_in, dtype=dtype), random_values(num_out, 1, dtype=dtype, seed=1)
    weight = torch.randint(-127, 128, (num_out, num_in), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    weight = weight.to(DEVICE)
    expected = (x.double() @ (weight.double() * scale.double()).t()).float()
    found = int8_linear(x, weight, scale)
    assert found.dtype is dtype
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error < {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]

"""The compiled operations around attention, and packed projections, against the portable ones."""

import concurrent.futures
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import Arena, DepthParts, PackedLinear, pack_plain, padded
from engine.ops.cpu.ops import CpuOps
from engine.ops.metadata import AttentionMetadata
from engine.ops.torch_ops import TorchOps, activate
from engine.weights.architectures import Activation
from engine.weights.decoder_weights import Linear
from engine.weights.precision import cpu_has
from tests.engine.cpu_kernels.pages import make_config, make_store, spans_for


@pytest.mark.parametrize("size", [1, 15, 16, 17, 576])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 9])
@pytest.mark.parametrize("activation", Activation)
def test_elementwise_equals_torch(kernels: CpuKernels, size: int, num_tokens: int, activation: Activation) -> None:
    config = replace(make_config(1, 1, 32, None), activation=activation)
    store = make_store(config, kernels.dtype)
    metadata = AttentionMetadata.from_spans(spans_for([(0, 1)], 16), block_size=16)
    ours, reference = CpuOps(config, store, kernels).plan(metadata), TorchOps(config, store).plan(metadata)
    tolerance = 1e-5 if kernels.dtype is torch.float32 else 2e-2
    assert_close = functools.partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
    x, residual = (torch.randn(num_tokens, size).to(kernels.dtype) for _ in range(2))
    weight = torch.rand(size).to(kernels.dtype).float()
    assert_close(ours.rms_norm(x, weight), reference.rms_norm(x, weight))
    streams = residual.clone(), residual.clone()
    assert_close(ours.add_rms_norm(x.clone(), streams[0], weight), reference.add_rms_norm(x, streams[1], weight))
    assert torch.equal(*streams)
    gate_up = torch.randn(num_tokens, 2 * size).mul(20).to(kernels.dtype)
    assert_close(ours.gate_mul(gate_up), reference.gate_mul(gate_up))


@pytest.mark.parametrize("activation", Activation)
def test_extreme_gates_equal_torch(kernels: CpuKernels, activation: Activation) -> None:
    config = replace(make_config(1, 1, 32, None), activation=activation)
    metadata = AttentionMetadata.from_spans(spans_for([(0, 1)], 16), block_size=16)
    step = CpuOps(config, make_store(config, kernels.dtype), kernels).plan(metadata)
    gate = torch.tensor([-3e38, -1e30, -200.0, -90.0, 0.0, 90.0, 1e30, 3e38, float("nan")], dtype=kernels.dtype)
    found = step.gate_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0, : len(gate)]
    torch.testing.assert_close(found, activate(gate.double(), activation).to(kernels.dtype), equal_nan=True)


def test_plan_on_a_new_thread_uses_as_many_threads_as_torch(float32_kernels: CpuKernels) -> None:
    """Otherwise a worker with one core would compute on all of them."""
    config = make_config(1, 1, 32, None)
    ops = CpuOps(config, make_store(config, torch.float32), float32_kernels)
    metadata = AttentionMetadata.from_spans(spans_for([(0, 1)], 16), block_size=16)

    def plan() -> int:
        float32_kernels.use_threads(7)  # as OpenMP would decide alone
        ops.plan(metadata)
        return float32_kernels.num_threads()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(plan).result() == torch.get_num_threads()


def make_linear(out_features: int, in_features: int, dtype: torch.dtype) -> Linear:
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    return Linear(
        weight=torch.randn(out_features, in_features, generator=generator).to(dtype),
        bias=torch.randn(out_features, generator=generator).to(dtype),
    )


def pack(linear: Linear, kernels: CpuKernels) -> PackedLinear:
    return pack_plain(linear, kernels, Arena(4 << 20))


@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 31, 32, 33, 48, 64, 100])
@pytest.mark.parametrize("in_features", [2, 30, 64, 66])
def test_product_equals_torch(kernels: CpuKernels, out_features: int, in_features: int) -> None:
    linear = make_linear(out_features, in_features, kernels.dtype)
    packed = pack(linear, kernels)
    for num_tokens in (1, 2, 3, 11, 12, 13, 25):
        x = torch.randn(num_tokens, in_features).to(kernels.dtype)
        assert linear.bias is not None
        expected = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        atol, rtol = (1e-4, 1e-5) if kernels.dtype is torch.float32 else (0.1, 1e-2)
        torch.testing.assert_close(packed(x).double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("in_features", [74, 96, 1218])  # the last: a register's runs in more than one block
def test_product_when_other_rows_change_keeps_its_bits(kernels: CpuKernels, in_features: int) -> None:
    packed = pack(make_linear(70, in_features, kernels.dtype), kernels)
    x = torch.randn(70, in_features).to(kernels.dtype)
    alone = torch.cat([packed(row[None]) for row in x])
    assert packed(x[:0]).shape == (0, 70)
    for num_tokens in (*range(2, 41), 70):
        assert torch.equal(packed(x[:num_tokens]), alone[:num_tokens])


@pytest.mark.parametrize("out_features", [576, 610])  # groups of panels, the last one incomplete
def test_wide_product_of_many_rows_equals_torch(kernels: CpuKernels, out_features: int) -> None:
    linear = make_linear(out_features, 1218, kernels.dtype)
    x = torch.randn(100, 1218).to(kernels.dtype)
    assert linear.bias is not None
    expected = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(pack(linear, kernels).wide(x).double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.skipif(not cpu_has("amx_bf16"), reason="needs a processor with tile registers for bfloat16")
def test_product_in_tiles_leaves_the_registers_to_torch(library: Path) -> None:
    kernels = CpuKernels(library, torch.bfloat16)
    packed, x = pack(make_linear(70, 608, torch.bfloat16), kernels), torch.randn(40, 608).bfloat16()
    weight = torch.randn(64, 608).bfloat16()
    expected = torch.nn.functional.linear(x, weight)
    for num_tokens in (1, 5, 40):
        packed(x[:num_tokens])
        assert torch.equal(torch.nn.functional.linear(x, weight), expected)


@pytest.mark.parametrize("in_features", [64, 74])
def test_product_when_a_row_is_not_finite_leaves_the_others(kernels: CpuKernels, in_features: int) -> None:
    packed = pack(make_linear(40, in_features, kernels.dtype), kernels)
    x = torch.randn(3, in_features).to(kernels.dtype)
    expected = packed(x)
    x[1, 5] = float("nan")
    found = packed(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_product_of_segments_equals_the_sum_of_their_products(kernels: CpuKernels, num_tokens: int) -> None:
    """Otherwise ranks, which have a part of the segments each, would not compute what one process does."""
    linear = Linear(weight=make_linear(70, 384, kernels.dtype).weight, bias=None)
    x = torch.randn(num_tokens, 384).to(kernels.dtype)
    parts = []
    for cut in (slice(0, 128), slice(128, 256), slice(256, 384)):
        part = pack(Linear(weight=linear.weight[:, cut], bias=None), kernels)
        parts.append(part.wide(x[:, cut].contiguous()))
    arena = Arena(padded(kernels.packed_size(70, 384), kernels.dtype))
    whole = pack_plain(linear, kernels, arena, DepthParts(num_segments=3))
    assert torch.equal(whole.wide(x), parts[0] + parts[1] + parts[2])

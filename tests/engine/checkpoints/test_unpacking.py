"""Every format of packed weights: bit for bit the values that its specification gives."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model.checkpoints.formats import BadModule, WeightFormat
from engine.model.checkpoints.quantization_config import read_weight_format
from engine.weights.config import UnsupportedModel
from engine.weights.grouped import GroupedWeight
from tests.engine.checkpoints.packers import Grid, compressed_config, make_grid, pack_awq, pack_compressed, pack_gptq

SHAPE = (40, 96)


def read(config: Mapping[str, Any]) -> WeightFormat:
    weight_format = read_weight_format({"quantization_config": config})
    assert weight_format is not None
    return weight_format


def grouped(config: Mapping[str, Any], parts: Mapping[str, Tensor], shape: tuple[int, int] = SHAPE) -> GroupedWeight:
    weight = read(config).unpack(parts, shape)
    assert isinstance(weight, GroupedWeight)
    return weight


def gptq_config(grid: Grid, **changes: Any) -> dict[str, Any]:
    group_size = -1 if grid.group_size == grid.codes.shape[1] else grid.group_size
    return {"quant_method": "gptq", "bits": grid.bits, "group_size": group_size, **changes}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def test_gptq_weight_with_act_order_has_the_values_of_its_grid() -> None:
    grid = make_grid(SHAPE, act_order=True)
    values = read(gptq_config(grid, desc_act=True)).unpack(pack_gptq(grid), SHAPE)
    assert isinstance(values, Tensor)
    assert torch.equal(values, grid.values())


def test_gptq_weight_without_g_idx_has_its_groups_in_order() -> None:
    grid = make_grid(SHAPE)
    parts = pack_gptq(grid)
    del parts["g_idx"]
    assert torch.equal(grouped(gptq_config(grid), parts).dequantize(torch.float32), grid.values())


def test_gptq_zero_points_less_one_that_borrowed_from_their_neighbours_are_restored() -> None:
    # A newer quantizer writes the older format by subtracting from words: a zero point of 0 borrows from the next one.
    grid = make_grid(SHAPE)
    grid.zeros[::3] = 0
    parts = pack_gptq(grid, v2=True)
    parts["qzeros"] = parts["qzeros"] - 0x11111111
    assert torch.equal(grouped(gptq_config(grid), parts).dequantize(torch.float32), grid.values())


@pytest.mark.parametrize("group_size", [64, 128])
def test_awq_weight_whose_last_group_is_not_full_has_a_scale_for_every_input(group_size: int) -> None:
    grid = make_grid(SHAPE, group_size=group_size)
    weight = grouped({**AWQ_CONFIG, "group_size": group_size}, pack_awq(grid))
    assert torch.equal(weight.dequantize(torch.float32), grid.values())


def test_awq_weight_with_too_few_groups_is_refused() -> None:
    # Kernels read a scale for each group, so that a missing one lies outside of their memory.
    parts = pack_awq(make_grid(SHAPE, group_size=64))
    few = {**parts, "qzeros": parts["qzeros"][:1], "scales": parts["scales"][:1]}
    with pytest.raises(BadModule, match=r"qzeros has shape \[1, 5\], not \[2, 5\]"):
        read({**AWQ_CONFIG, "group_size": 64}).unpack(few, SHAPE)


def test_awq_config_of_autoawq_itself_is_read() -> None:
    grid = make_grid(SHAPE)
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    assert torch.equal(grouped(config, pack_awq(grid)).dequantize(torch.float32), grid.values())


def test_compressed_weight_with_act_order_has_the_values_of_its_grid() -> None:
    grid = make_grid(SHAPE, act_order=True, symmetric=True)
    parts = {**pack_compressed(grid, symmetric=True), "weight_g_idx": torch.tensor(grid.groups, dtype=torch.int32)}
    values = read(compressed_config()).unpack(parts, SHAPE)
    assert isinstance(values, Tensor)
    assert torch.equal(values, grid.values())


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_compressed_weight_has_the_values_of_its_grid(symmetric: bool) -> None:
    grid = make_grid(SHAPE, bits=8, group_size=-1, symmetric=symmetric)
    parts = {"weight": (grid.codes - 128).to(torch.int8), "weight_scale": grid.scales}
    if not symmetric:
        parts["weight_zero_point"] = (grid.zeros - 128).to(torch.int8)
    weight = grouped(compressed_config(bits=8, group_size=-1, format="int-quantized"), parts)
    assert torch.equal(weight.dequantize(torch.float32), grid.values())


@pytest.mark.parametrize("scale", [torch.rand(40, 1), torch.tensor([0.3]), torch.tensor(0.3)])
def test_float8_compressed_weight_is_its_number_times_its_scale(scale: Tensor) -> None:
    stored = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    config = compressed_config(format="float-quantized")
    config["config_groups"]["group_0"]["weights"] = {"num_bits": 8, "type": "float", "strategy": "channel"}
    values = read(config).unpack({"weight": stored, "weight_scale": scale}, SHAPE)
    assert isinstance(values, Tensor)
    assert torch.equal(values, stored.float() * scale)


def test_groups_that_kernels_cannot_take_become_plain_values() -> None:
    grid = make_grid(SHAPE, group_size=24)
    values = read(gptq_config(grid)).unpack(pack_gptq(grid), SHAPE)
    assert isinstance(values, Tensor)
    assert torch.equal(values, grid.values())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, -1]),
    symmetric=st.booleans(),
    layout=st.sampled_from(["gptq", "gptq_v2"]),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_weight_of_any_format_and_size_has_the_values_of_its_grid(
    rows: int,
    columns: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    layout: str,
    scale_dtype: torch.dtype,
    seed: int,
) -> None:
    shape = (8 * rows, 32 * columns)
    grid = make_grid(shape, bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, seed=seed)
    config = compressed_config(bits=bits, group_size=group_size, symmetric=symmetric)
    compressed = grouped(config, pack_compressed(grid, symmetric=symmetric), shape)
    if scale_dtype is torch.bfloat16:  # as the format's own library computes
        assert torch.equal(compressed.dequantize(torch.bfloat16), grid.values(torch.bfloat16))
    gptq = grouped(gptq_config(grid, checkpoint_format=layout), pack_gptq(grid, v2=layout == "gptq_v2"), shape)
    assert (gptq.offsets is None) == symmetric, "kernels are faster on symmetric grids"
    packed = [gptq, compressed]
    if bits == 4:
        packed.append(grouped({**AWQ_CONFIG, "group_size": group_size}, pack_awq(grid), shape))
    for weight in packed:
        assert torch.equal(weight.dequantize(torch.float32), grid.values())
        assert (weight.bits, weight.group_size) == (bits, grid.group_size)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"quantization_config\.quant_method: 'bitsandbytes' is not supported; supported are awq, compressed-tensors"
            ", gptq and mxfp4",
        ),
        (
            {"quant_method": "gptq", "bits": 3},
            r"quantization_config\.bits: 3 is not supported; supported are 4 and 8",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size: 0 is neither positive nor -1"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format: 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_p"}, r"quantization_config\.format: 'gptq_p'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, r"pack_dtype: 'int16'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic: '\+:\.\*down\.\*'"),
        ({**AWQ_CONFIG, "bits": 8}, r"quantization_config\.bits: 8 is not supported; supported is 4"),
        ({**AWQ_CONFIG, "version": "gemv"}, r"quantization_config\.version: 'gemv'"),
        ({**AWQ_CONFIG, "zero_point": False}, r"quantization_config\.zero_point: False"),
        ({**AWQ_CONFIG, "group_size": None}, r"group_size: None"),
        (compressed_config(format="nvfp4-pack-quantized"), r"quantization_config\.format: 'nvfp4-pack-quantized'"),
        (compressed_config(bits=3), r"config_groups\.group_0\.weights\.num_bits: 3 is not supported"),
        (compressed_config(quantization_status="frozen"), r"quantization_status: 'frozen'"),
        (compressed_config(config_groups={"W4A16": ["Linear"]}), r"config_groups: \{'W4A16'"),
        (compressed_config(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config\.format: 'sparse-24"),
        (compressed_config(transform_config={"config_groups": {"R1": {}}}), r"transform_config\.config_groups"),
        (compressed_config(group_size=0), r"config_groups\.group_0\.weights\.group_size: 0"),
    ],
)
def test_format_that_is_not_read_is_refused_by_key_and_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(config)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_gptq_tensor_of_another_shape_is_refused_by_name(part: str) -> None:
    grid = make_grid(SHAPE)
    parts = pack_gptq(grid)
    parts[part] = parts[part][:-1]
    with pytest.raises(BadModule, match=f"{part} has shape"):
        read(gptq_config(grid)).unpack(parts, SHAPE)


def test_g_idx_beyond_the_groups_is_refused() -> None:
    grid = make_grid(SHAPE)
    parts = {**pack_gptq(grid), "g_idx": torch.full((96,), 3)}
    with pytest.raises(BadModule, match="g_idx names groups beyond the 3"):
        read(gptq_config(grid)).unpack(parts, SHAPE)


@pytest.mark.parametrize("shape", [(40, 1), (40, 7), (1, 7)])
def test_zero_points_of_other_groups_than_the_scales_are_refused(shape: tuple[int, int]) -> None:
    grid = make_grid(SHAPE, bits=8)
    parts = {"weight": (grid.codes - 128).to(torch.int8), "weight_scale": grid.scales}
    parts["weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)
    with pytest.raises(BadModule, match="weight_zero_point has shape"):
        read(compressed_config(bits=8)).unpack(parts, SHAPE)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": []},
        {"quant_method": "gptq", "bits": 4, "dynamic": 5},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "sparsity_config": "dense"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": 4}}},
    ],
)
def test_malformed_quantization_config_is_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        read(config)


def test_compressed_weight_in_groups_of_no_configured_size_is_refused() -> None:
    parts = pack_compressed(make_grid(SHAPE), symmetric=True)
    with pytest.raises(BadModule, match=r"96 inputs in 3 groups have none of the sizes \(64,\)"):
        read(compressed_config(group_size=64)).unpack(parts, SHAPE)

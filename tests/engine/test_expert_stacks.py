"""Mixtures of experts as a GPU computes them, on a CPU: the same sums as expert by expert, without the host."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.random_models import CONFIGS
from engine.options import EngineOptions, ModelDescription
from engine.weights.config import DecoderConfig, UnsupportedModel, parse_config
from engine.weights.decoder_weights import Moe
from engine.weights.expert_stacks import ExpertStack, StackedMoe, check_experts, padded_features
from engine.weights.layout import allocate_weights, checkpoint_views

CPU, META = torch.device("cpu"), torch.device("meta")
_RAW: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 44,
    "intermediate_size": 24,
    "moe_intermediate_size": 21,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LATENT = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
CONFIGURATIONS = {
    "weighted inputs": _RAW | {"architectures": ["Llama4ForCausalLM"], "intermediate_size_mlp": 24},
    "softmax": _RAW,
    "shared expert with a gate": _RAW
    | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 30, "norm_topk_prob": False},
    "biases and a clamped gate": _RAW | {"architectures": ["GptOssForCausalLM"], "sliding_window": 9},
    "sigmoid, groups and a score bias": _RAW
    | _LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
}


def gate_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def both(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> tuple[Moe, StackedMoe]:
    """Return the mixture with single experts and with stacked ones, of the same random weights."""
    single = allocate_weights(config, dtype=dtype, device=CPU)
    stacked = allocate_weights(config, dtype=dtype, device=CPU, stacks_experts=True)
    views, generator = checkpoint_views(stacked, config), torch.Generator().manual_seed(0)
    for name, view in checkpoint_views(single, config).items():
        view.copy_(torch.randn(view.shape, generator=generator) * 0.3)
        views[name].copy_(view)
    plain, stacks = single.layers[0].mlp, stacked.layers[0].mlp
    assert isinstance(plain, Moe) and isinstance(stacks, StackedMoe)
    return plain, stacks


def rows(num_tokens: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((num_tokens, size), generator=torch.Generator().manual_seed(num_tokens)).to(dtype)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 50])
@pytest.mark.parametrize("name", CONFIGURATIONS)
@torch.inference_mode()
def test_stacked_experts_add_up_to_what_single_ones_do(
    name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.weights.expert_stacks._SUMMED_TOKENS", 4)
    config = parse_config(CONFIGURATIONS[name])
    single, stacked = both(config)
    x = rows(num_tokens, config.hidden_size)
    torch.testing.assert_close(stacked(x, gate_mul), single(x, gate_mul), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@torch.inference_mode()
def test_stacked_experts_in_bfloat16_with_padded_rows_stay_near_single_ones(name: str) -> None:
    config = parse_config(CONFIGURATIONS[name])  # rows of 44 and 21 values are not whole in units of 16 bytes
    single, stacked = both(config, torch.bfloat16)
    assert {stacked.gate_up.weight.shape[2], stacked.down.weight.shape[2]} == {48, 24}
    x = rows(20, config.hidden_size, torch.bfloat16)
    expected = single(x, gate_mul).float()
    assert (stacked(x, gate_mul).float() - expected).abs().mean() < 0.02 * expected.abs().mean()


@pytest.mark.parametrize("in_features", [1, 7, 8, 9, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 2, 1), (0, 0, 0, 5), (6, 0, 0, 0), (1, 1, 1, 1)])
def test_grouped_product_of_any_groups_and_row_length_equals_one_by_one(
    counts: tuple[int, ...], dtype: torch.dtype, in_features: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.zeros((len(counts), 5, padded_features(in_features, dtype)), dtype=dtype)
    weight[..., :in_features] = torch.randn((len(counts), 5, in_features), generator=generator)
    bias = torch.randn((len(counts), 5), generator=generator).to(dtype)
    stack = ExpertStack(weight=weight, bias=bias, in_features=in_features)
    x = rows(sum(counts), in_features, dtype)
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    found = stack(x, experts, torch.tensor(counts).cumsum(0).int())
    expected = torch.stack([stack.linear(int(expert))(row[None])[0] for row, expert in zip(x, experts, strict=True)])
    assert found.is_contiguous()
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_mixtures_of_published_shapes_run_where_no_value_can_be_read(name: str) -> None:
    """Tensors without content end anything that waits for a value, and have the rules of CUDA for grouped products."""
    config = parse_config({**CONFIGS[name], "num_hidden_layers": 2})
    moe = allocate_weights(config, dtype=torch.bfloat16, device=META, stacks_experts=True).layers[1].mlp
    assert isinstance(moe, StackedMoe)
    for num_tokens in (1, 48, 2000):
        x = torch.empty((num_tokens, config.hidden_size), dtype=torch.bfloat16, device=META)
        assert moe(x, gate_mul).shape == x.shape


def test_single_experts_do_wait_for_the_host() -> None:
    config = parse_config(_RAW)
    moe = allocate_weights(config, dtype=torch.bfloat16, device=META).layers[0].mlp
    assert moe is not None
    with pytest.raises((NotImplementedError, RuntimeError)):
        moe(torch.empty((3, config.hidden_size), dtype=torch.bfloat16, device=META), gate_mul)


@torch.inference_mode()
def test_a_row_that_is_not_a_number_leaves_all_others_as_they_are() -> None:
    config = parse_config(_RAW)
    _single, stacked = both(config)
    x = rows(9, config.hidden_size)
    expected = stacked(x, gate_mul)
    x[4] = float("nan")
    found, others = stacked(x, gate_mul), [0, 1, 2, 3, 5, 6, 7, 8]
    torch.testing.assert_close(found[others], expected[others])


def test_experts_of_a_layer_are_views_of_its_stacks() -> None:
    config = parse_config(_RAW)
    moe = both(config)[1]
    for stack, projections in (
        (moe.gate_up, [expert.gate_up for expert in moe.experts]),
        (moe.down, [expert.down for expert in moe.experts]),
    ):
        addresses = [projection.weight.untyped_storage().data_ptr() for projection in projections]  # type: ignore[attr-defined]
        assert set(addresses) == {stack.weight.untyped_storage().data_ptr()}


def test_chunked_attention_on_a_gpu_is_refused_by_name(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.options.resolve_device", lambda _device: torch.device("cuda"))
    with pytest.raises(UnsupportedModel, match=r"chunks of a text, are computed on CPUs only; set model\.device: cpu"):
        ModelDescription.read(EngineOptions(model_dir=checkpoint("llama4"), model_name="tiny", dtype="bfloat16"))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("qwen3_moe", {"quantization": "int4"}, "experts in int4 on a GPU"),
        ("deepseek_v2", {"quantization": "fp8"}, "experts in fp8 on a GPU"),
        ("deepseek_v2", {"kv_dtype": "fp8"}, "kv_dtype: fp8 with latent attention: .*; choose auto"),
    ],
)
def test_options_of_mixtures_that_a_gpu_does_not_have_are_refused(
    name: str,
    options: dict[str, Any],
    reason: str,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.options.resolve_device", lambda _device: torch.device("cuda"))
    folder = checkpoint(name)
    described = ModelDescription.read(EngineOptions(model_dir=folder, model_name="tiny", dtype="bfloat16"))
    assert isinstance(described.config, DecoderConfig)
    with pytest.raises(UnsupportedModel, match=reason):
        ModelDescription.read(EngineOptions(model_dir=folder, model_name="tiny", dtype="bfloat16", **options))


def test_mixtures_that_a_gpu_does_not_compute_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config, gpu = parse_config(_RAW), torch.device("cuda")
    with pytest.raises(UnsupportedModel, match=r"experts in fp8 on a GPU: .*; leave model\.quantization out"):
        check_experts(config, "fp8", device=gpu)
    check_experts(config, "int8", device=CPU)
    check_experts(config, None, device=gpu)
    monkeypatch.delattr(F, "grouped_mm")
    check_experts(config, None, device=CPU)
    with pytest.raises(UnsupportedModel, match=r"has no grouped_mm; install torch 2\.10 or later"):
        check_experts(config, None, device=gpu)

"""Reading of config.json, and refusals of unsupported features."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.weights.config import DecoderConfig, UnsupportedModel, parse_config, read_json
from engine.weights.experts import ClampedGate
from engine.weights.mamba import MambaConfig
from engine.weights.nope import NopeConfig, QueryGrowth
from engine.weights.precision import cpu_has_bfloat16, dtype_name, resolve_device, resolve_dtype
from engine.weights.rope_config import RopeType
from engine.window import Window

CPU = torch.device("cpu")


DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def make_raw(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        **overrides,
    }


def sizes(config: DecoderConfig) -> tuple[int | None, ...]:
    """Return the tokens of sliding windows."""
    assert not any(window is not None and window.is_chunk for window in config.windows)
    return tuple(None if window is None else window.num_tokens for window in config.windows)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": None, "model_type": "mamba"}, "model_type: 'mamba'"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "Llama4ForConditionalGeneration is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide among 3"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_parse_config_when_something_is_unsupported_names_it(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(make_raw(**overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts": None}, "num_experts is None"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than the 8 experts"),
        ({"moe_intermediate_size": 1 << 30}, "moe_intermediate_size: 1073741824 is not supported"),
    ],
)
def test_parse_config_when_experts_make_no_sense_names_the_key(overrides: dict[str, Any], message: str) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(make_raw("Qwen3MoeForCausalLM", **experts | overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"topk_method": "random"}, "topk_method: 'random' is not supported; supported are greedy"),
        ({"scoring_func": "relu"}, "scoring_func: 'relu' is not supported"),
        ({"n_group": 3}, "n_group: 3 and topk_group: 1 do not fit 8 experts"),
        ({"n_group": 2, "topk_group": 3}, "n_group: 2 and topk_group: 3"),
        ({"n_group": 8}, "n_group: 8 and topk_group: 1"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok: 3 is more than the 2 experts"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: 5 is odd"),
        ({"routed_scaling_factor": "two"}, "routed_scaling_factor: 'two' is not a number"),
        ({"n_shared_experts": 1 << 20}, "n_shared_experts: 33554432 inputs of one expert are not supported"),
        *(({key: "2"}, f"{key} is '2'") for key in ("n_group", "first_k_dense_replace", "moe_layer_freq")),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
    ],
)
def test_parse_config_when_deepseek_makes_no_sense_names_the_key(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(make_raw("DeepseekV3ForCausalLM", **DEEPSEEK) | overrides)


def test_parse_config_when_deepseek_has_mlps_first_and_between_names_their_layers() -> None:
    raw = make_raw("DeepseekV2ForCausalLM", **DEEPSEEK, first_k_dense_replace=1, moe_layer_freq=2)
    experts = parse_config(raw).experts
    assert experts is not None
    assert experts.dense_layers == (0, 1, 3)


def test_parse_config_when_mixtral_leaves_keys_out_uses_its_defaults() -> None:
    config = parse_config(make_raw("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2))
    assert (config.rms_norm_eps, config.rope.theta, config.windows) == (1e-5, 1_000_000.0, (None,) * 4)
    assert config.experts is not None
    assert (config.experts.intermediate_size, config.experts.has_normalised_weights) == (96, True)


def test_parse_config_when_gpt_oss_leaves_keys_out_uses_its_defaults() -> None:
    config = parse_config(make_raw("GptOssForCausalLM", num_local_experts=8, num_experts_per_tok=2))
    assert (config.rms_norm_eps, config.rope.theta, config.head_dim) == (1e-5, 150_000.0, 64)
    assert (config.has_qkv_bias, config.has_output_bias, config.has_sinks) == (True, True, True)
    assert sizes(config) == (128, None, 128, None)
    assert config.experts is not None
    assert config.experts.clamped_gate == ClampedGate(steepness=1.702, limit=7.0)
    named = make_raw("GptOssForCausalLM", num_local_experts=8, num_experts_per_tok=2, sliding_window=5)
    named["layer_types"] = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    assert sizes(parse_config(named)) == (None, None, 5, None)


GRANITE4 = {"shared_intermediate_size": 40, "num_local_experts": 0, "mamba_n_heads": 8, "mamba_d_state": 16}
GRANITE4_LAYERS = ["mamba", "linear_attention", "attention", "full_attention"]


def test_parse_config_when_granite_leaves_keys_out_uses_its_defaults() -> None:
    config = parse_config(make_raw("GraniteForCausalLM"))
    assert (config.embedding_scale, config.residual_scale, config.score_scale, config.logits_divisor) == (1, 1, 1, 1)
    config = parse_config(make_raw("GraniteMoeHybridForCausalLM", **GRANITE4, layer_types=GRANITE4_LAYERS))
    assert (config.experts, config.intermediate_size) == (None, 40)
    assert [config.rope_of(layer_idx) for layer_idx in range(4)] == [None] * 4
    mamba = config.recurrent
    assert isinstance(mamba, MambaConfig)
    assert (sorted(mamba.layers), mamba.head_dim, mamba.kernel_size) == ([0, 1], 2 * config.hidden_size // 8, 4)
    assert (mamba.has_bias, mamba.has_convolution_bias, mamba.time_step_limits) == (False, True, (0, math.inf))


def test_parse_config_reads_the_factors_rotation_and_infinity_of_granite() -> None:
    factors = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.01}
    limit = {"time_step_limit": [0.001, {"__float__": "Infinity"}]}
    raw = make_raw(
        "GraniteMoeHybridForCausalLM",
        **(GRANITE4 | factors | limit),
        logits_scaling=8.0,
        layer_types=GRANITE4_LAYERS,
        position_embedding_type="rope",
    )
    config = parse_config(raw)
    assert (config.embedding_scale, config.residual_scale, config.score_scale) == (12, 0.22, 0.01)
    assert (config.logits_divisor, config.nope) == (8, None)
    assert isinstance(config.recurrent, MambaConfig)
    assert config.recurrent.time_step_limits == (0.001, math.inf)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layer_types": ["mamba"] * 3}, "3 layers of 4"),
        ({"layer_types": ["mamba", "attention", "mlp", "mamba"]}, "mlp"),
        ({"layer_types": ["mamba"] * 4}, "no layer with attention"),
        ({"mamba_n_heads": 7}, "mamba_n_heads"),
        ({"mamba_n_groups": 3}, "mamba_n_groups"),
        ({"time_step_limit": [0.1]}, "time_step_limit"),
        ({"residual_multiplier": 0}, "residual_multiplier"),
    ],
)
def test_parse_config_when_granite_4_is_not_supported_names_the_key(wrong: dict[str, Any], message: str) -> None:
    raw = make_raw("GraniteMoeHybridForCausalLM", **{**GRANITE4, "layer_types": GRANITE4_LAYERS, **wrong})
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(raw)


NEMOTRON = {"hybrid_override_pattern": "M-M*-", "mamba_num_heads": 8, "mamba_head_dim": 8, "layer_norm_epsilon": 1e-4}


def test_parse_config_joins_an_mlp_that_is_a_layer_to_the_mixer_before_it() -> None:
    config = parse_config(make_raw("NemotronHForCausalLM", **NEMOTRON))
    assert (config.num_layers, config.lone_layers, config.rms_norm_eps) == (3, (1,), 1e-4)
    assert ([config.rope_of(layer_idx) for layer_idx in range(3)], config.has_gates) == ([None] * 3, False)
    assert isinstance(config.recurrent, MambaConfig)
    assert sorted(config.recurrent.layers) == [0, 1]
    assert config.recurrent.time_step_limits == (0.001, math.inf)
    layers = ["mamba", "mlp", "linear_attention", "full_attention", "mlp"]
    raw = make_raw("NemotronHForCausalLM", **{**NEMOTRON, "hybrid_override_pattern": None}, layers_block_type=layers)
    assert parse_config(raw) == config


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("-M*", "follows no mixer"),
        ("M*--", "follows no mixer"),
        ("*-", "without Mamba"),
        ("MX*", "X is not supported"),
        ("", "no layer"),
    ],
)
def test_parse_config_when_a_pattern_of_blocks_is_not_supported_names_it(pattern: str, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"hybrid_override_pattern: .*{message}"):
        parse_config(make_raw("NemotronHForCausalLM", **{**NEMOTRON, "hybrid_override_pattern": pattern}))


def test_parse_config_when_experts_have_inputs_of_another_size_names_the_key() -> None:
    raw = make_raw("NemotronHForCausalLM", **{**NEMOTRON, "hybrid_override_pattern": "ME*"}, moe_latent_size=32)
    with pytest.raises(UnsupportedModel, match="moe_latent_size: 32"):
        parse_config(raw)


def test_parse_config_when_a_layer_type_is_unknown_names_it() -> None:
    layer_types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        parse_config(make_raw("Qwen3ForCausalLM", layer_types=layer_types))


def test_parse_config_when_keys_are_left_out_uses_the_architectures_defaults() -> None:
    llama = parse_config(make_raw("LlamaForCausalLM"))
    assert (llama.head_dim, llama.has_qkv_bias, llama.has_qk_norm) == (16, False, False)
    assert (llama.rms_norm_eps, llama.rope.theta, llama.has_tied_embeddings) == (1e-6, 10_000.0, False)
    assert parse_config(make_raw("Qwen3ForCausalLM")).head_dim == 128
    assert parse_config(make_raw("Qwen3ForCausalLM")).has_qk_norm
    assert parse_config(make_raw("Qwen2ForCausalLM")).has_qkv_bias
    assert not parse_config(make_raw("Qwen2ForCausalLM")).has_output_bias
    assert sizes(parse_config(make_raw("MistralForCausalLM"))) == (4096,) * 4


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"sliding_window": 7}, (None,) * 4),
        ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 7)),
        ({"sliding_window": 7, "use_sliding_window": True}, (None,) * 4),
        (
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
    ],
)
def test_parse_config_when_qwen_has_a_window_applies_it_to_the_named_layers(
    overrides: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert sizes(parse_config(make_raw("Qwen2ForCausalLM", **overrides))) == windows


def test_parse_config_when_qwen2_moe_has_a_window_applies_it_to_every_other_layer() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    raw = make_raw("Qwen2MoeForCausalLM", **experts, shared_expert_intermediate_size=64, num_hidden_layers=6)
    windowed = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 4}
    assert parse_config(raw).windows == (None,) * 6
    assert sizes(parse_config(raw | windowed)) == (7, None, 7, None, None, None)


LLAMA_4 = {
    "intermediate_size_mlp": 160,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 5,
    "rope_theta": 5e5,
}


def test_parse_config_when_llama_4_leaves_keys_out_uses_its_defaults() -> None:
    config = parse_config(make_raw("Llama4ForCausalLM", **LLAMA_4, no_rope_layers=[], moe_layers=[1, 2]))
    chunk = Window(num_tokens=8192, is_chunk=True)
    assert config.windows == (chunk, chunk, chunk, None, chunk)
    assert [config.rope_of(layer_idx) for layer_idx in range(5)] == [*[config.rope] * 3, None, config.rope]
    growth = QueryGrowth(strength=0.1, num_tokens=8192)
    assert config.nope == NopeConfig(layers=(3,), query_growth=growth, has_norms_elsewhere=True)
    assert not config.has_qk_norm
    assert config.experts is not None
    assert config.experts.dense_layers == (0, 3, 4)
    assert (config.intermediate_size, config.experts.intermediate_size, config.experts.shared_size) == (160, 96, 96)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"attention_chunk_size": None}, "attention_chunk_size is None"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers of 5"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_attention is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "use_qk_norm"),
        ({"interleave_moe_layer_step": -1}, "interleave_moe_layer_step is -1"),
    ],
)
def test_parse_config_when_a_key_of_llama_4_does_not_fit_names_it(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        parse_config(make_raw("Llama4ForCausalLM", **LLAMA_4, **overrides))


@pytest.mark.parametrize("key", ["query_pre_attn_scalar", "sliding_window", "sliding_window_pattern"])
def test_parse_config_when_a_key_of_gemma_is_no_positive_number_names_it(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} is 0"):
        parse_config(make_raw("Gemma3ForCausalLM", **{key: 0}))


GEMMA_3_4B = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 7e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
            },
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        },
    ],
)
def test_parse_config_when_gemma_is_spelled_old_or_new_reads_the_same(spelling: dict[str, Any]) -> None:
    config = parse_config(make_raw("Gemma3ForCausalLM", **GEMMA_3_4B, **spelling))
    assert sizes(config) == (*(1024,) * 5, None, 1024)
    full, windowed = config.rope_of(5), config.rope_of(6)
    assert full is not None
    assert windowed is not None
    assert (full.rope_type, full.theta, full.factor) == (RopeType.LINEAR, 5e5, 8.0)
    assert (windowed.rope_type, windowed.theta) == (RopeType.DEFAULT, 7e3)
    assert config.max_position_embeddings == 512, "stretched already"
    assert config.score_scale == 168**-0.5
    assert config.has_tied_embeddings
    assert config.head_dim == 256


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}},
        {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_parse_config_when_rope_is_spelled_old_or_new_reads_the_same(spelling: dict[str, Any]) -> None:
    rope = parse_config(make_raw(**spelling)).rope
    assert (rope.rope_type, rope.theta, rope.factor) == (RopeType.LINEAR, 77.0, 2.0)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "original_max_position_embeddings": 128}, 512),
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"type": "dynamic", "factor": 4}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
    ],
)
def test_stretched_positions_reach_as_far_as_the_makers_say(rope: dict[str, Any], length: int) -> None:
    assert parse_config(make_raw(rope_scaling=rope)).max_position_embeddings == length


@pytest.mark.parametrize(("content", "message"), [("[1]", "no JSON object"), ("{", "not JSON"), (None, "cannot read")])
def test_read_json_when_file_is_bad_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UnsupportedModel, match=message):
        read_json(path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx512f", False),
        ("no such line", False),
    ],
)
def test_cpu_has_bfloat16_when_flags_say_so(tmp_path: Path, flags: str, expected: bool) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\n{flags}\n")
    assert cpu_has_bfloat16(cpu_info) is expected


def test_cpu_has_bfloat16_is_false_when_unknown(tmp_path: Path) -> None:
    assert not cpu_has_bfloat16(tmp_path / "missing")


def test_resolve_dtype_auto_follows_the_processor_on_cpu_and_the_checkpoint_on_cuda() -> None:
    expected = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    assert resolve_dtype("auto", CPU, {"dtype": "float16"}) is expected
    assert resolve_dtype("auto", torch.device("cuda"), {"dtype": "float16"}) is torch.float16
    assert resolve_dtype("auto", torch.device("cuda"), {"torch_dtype": "bfloat16"}) is torch.bfloat16
    assert dtype_name(resolve_dtype("float32", CPU, {"dtype": "bfloat16"})) == "float32"


def test_resolve_dtype_when_checkpoint_is_of_another_format_names_it() -> None:
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        resolve_dtype("auto", torch.device("cuda"), {"dtype": "float8_e4m3fn"})


def test_resolve_device_when_cuda_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(UnsupportedModel, match="no CUDA device"):
        resolve_device("cuda")

"""Reading of config.json, and refusals of unsupported features."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.config import RopeType, UnsupportedModel, parse_config, read_json
from engine.model.precision import cpu_has_bfloat16, dtype_name, resolve_device, resolve_dtype

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": None, "model_type": "mamba"}, "model_type: 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide among 3"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_parse_config_when_something_is_unsupported_names_it(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(make_raw(**overrides))


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
    assert parse_config(make_raw("MistralForCausalLM")).windows == (4096,) * 4


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
    assert parse_config(make_raw("Qwen2ForCausalLM", **overrides)).windows == windows


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

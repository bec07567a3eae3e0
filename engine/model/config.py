"""Configurations of decoders: our own, from config.json, and those that transformers computes, from a trial run.

Our five architectures differ in a handful of switches of `DecoderConfig`; later code does not check their names. Keys
that a config omits get the defaults of the architecture's reference implementation. Settings that change the arithmetic
and are not implemented are refused here, by name, before a weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from common.process import CannotStart


class UnsupportedModel(CannotStart):
    """The checkpoint is incomplete or needs something that is not implemented; the message names it."""

    key = "model.id"


class RopeType(Enum):
    """Method of stretching rotary frequencies beyond the trained length."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; `rope_type` decides which optional values are used."""

    rope_type: RopeType
    theta: float
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    rounds_correction_range: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """All that the arithmetic depends on, apart from the weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest text, with stretched frequencies where the checkpoint has them."""
    rms_norm_eps: float
    has_qkv_bias: bool
    has_output_bias: bool
    """Whether the projection after attention has a bias."""
    has_mlp_bias: bool
    has_qk_norm: bool
    has_tied_embeddings: bool
    windows: tuple[int | None, ...]
    """Window of each layer: number of tokens that a token attends to, itself included; None: all."""
    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """Behaviour of a reference implementation that config.json does not state."""

    has_qkv_bias: bool | None
    """None: `attention_bias` decides, for the projection after attention too."""
    has_qk_norm: bool = False
    reads_mlp_bias: bool = False
    default_head_dim: int | None = None
    default_num_kv_heads: int | None = None
    has_layer_types: bool = False
    """Whether `use_sliding_window` and `layer_types` say which layers have a window."""
    has_window: bool = False
    """Whether `sliding_window` holds for every layer."""


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(has_qkv_bias=None, reads_mlp_bias=True),
    "MistralForCausalLM": _Architecture(has_qkv_bias=False, has_window=True, default_num_kv_heads=8),
    "Qwen2ForCausalLM": _Architecture(has_qkv_bias=True, has_layer_types=True, default_num_kv_heads=32),
    # Qwen2 with a draft layer in the same checkpoint.
    "MiMoForCausalLM": _Architecture(has_qkv_bias=True, has_layer_types=True, default_num_kv_heads=32),
    "Qwen3ForCausalLM": _Architecture(
        has_qkv_bias=None, has_qk_norm=True, has_layer_types=True, default_head_dim=128, default_num_kv_heads=32
    ),
}
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DEFAULT_THETA = 10_000.0
# A damaged or hostile file could otherwise claim billions, and take all memory.
_MAX_LAYERS = 4096
_MAX_SIZE = 1 << 24  # of a vocabulary or a layer


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises UnsupportedModel when the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModel(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return content


def is_native(raw: Mapping[str, Any]) -> bool:
    """Whether our own decoder computes the model that a config.json describes."""
    return any(name in _ARCHITECTURES for name in raw.get("architectures") or ())


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises UnsupportedModel, naming the unsupported feature."""
    architecture = _architecture(raw)
    activation = raw.get("hidden_act") or "silu"
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act: {activation!r} is not supported, only 'silu'")
    num_heads = _positive(raw, "num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads", architecture.default_num_kv_heads) or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"{num_heads} query heads do not divide among {num_kv_heads} key heads")
    hidden_size = _positive(raw, "hidden_size", at_most=_MAX_SIZE)
    head_dim = raw.get("head_dim") or architecture.default_head_dim or hidden_size // num_heads
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim: {head_dim} is odd; rotary embedding turns pairs")
    has_attention_bias = bool(raw.get("attention_bias", False))
    follows_config = architecture.has_qkv_bias is None
    return DecoderConfig(
        vocab_size=_positive(raw, "vocab_size", at_most=_MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size", at_most=_MAX_SIZE),
        num_layers=_positive(raw, "num_hidden_layers", at_most=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=longest_text(raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        has_qkv_bias=has_attention_bias if follows_config else bool(architecture.has_qkv_bias),
        has_output_bias=has_attention_bias and follows_config,
        has_mlp_bias=architecture.reads_mlp_bias and bool(raw.get("mlp_bias", False)),
        has_qk_norm=architecture.has_qk_norm,
        has_tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        windows=_windows(raw, architecture),
        rope=_rope(raw),
    )


def longest_text(raw: Mapping[str, Any]) -> int:
    """Return the tokens that a config.json's positions are good for. Raises UnsupportedModel.

    `max_position_embeddings` is the trained length where frequencies are stretched by a factor, and the stretched one
    for the other ways.
    """
    trained = _positive(raw, "max_position_embeddings")
    params = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    name, factor = params.get("rope_type", params.get("type")), params.get("factor")
    if not isinstance(factor, int | float):
        return trained
    if name == "yarn":
        return int((params.get("original_max_position_embeddings") or trained) * factor)
    return int(trained * factor) if name in ("linear", "dynamic") else trained


def for_length(config: DecoderConfig, num_tokens: int) -> DecoderConfig:
    """Return the decoder for texts of so many tokens: dynamic frequencies are those of the longest text, for all."""
    rope = config.rope
    stretch = rope.factor * num_tokens / rope.original_max_position_embeddings - rope.factor + 1
    if rope.rope_type is not RopeType.DYNAMIC or stretch <= 1:
        return config
    theta = rope.theta * stretch ** (config.head_dim / (config.head_dim - 2))
    return replace(config, rope=replace(rope, theta=theta))


def _architecture(raw: Mapping[str, Any]) -> _Architecture:
    names = raw.get("architectures") or []
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    found = ", ".join(names) or f"none named (model_type: {raw.get('model_type')!r})"
    raise UnsupportedModel(f"architecture {found} is not supported; supported are {', '.join(_ARCHITECTURES)}")


def _windows(raw: Mapping[str, Any], architecture: _Architecture) -> tuple[int | None, ...]:
    num_layers = _positive(raw, "num_hidden_layers", at_most=_MAX_LAYERS)
    if architecture.has_window:
        return (raw.get("sliding_window", _DEFAULT_WINDOW) or None,) * num_layers
    if not architecture.has_layer_types:
        return (None,) * num_layers
    window = (raw.get("sliding_window", _DEFAULT_WINDOW) or None) if raw.get("use_sliding_window") else None
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first_windowed = raw.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer_idx >= first_windowed else None for layer_idx in range(num_layers))
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(unknown)} is not supported")
    if len(layer_types) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(layer_types)} layers of {num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # New configs have rope_parameters; older ones have rope_theta and an optional rope_scaling.
    params = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    name = params.get("rope_type", params.get("type", "default"))
    if any(isinstance(value, Mapping) for value in params.values()):
        raise UnsupportedModel("rope_parameters that differ by layer are not supported")
    if name not in {kind.value for kind in RopeType}:
        raise UnsupportedModel(f"rope_type: {name!r} is not supported")
    if (params.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not supported")
    rope_type = RopeType(name)
    max_positions = _positive(raw, "max_position_embeddings")
    original = raw.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    original = original or max_positions
    required = {
        RopeType.LINEAR: ("factor",),
        RopeType.DYNAMIC: ("factor",),
        RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    }.get(rope_type, ())
    for key in required:
        if params.get(key) is None:
            raise UnsupportedModel(f"rope_type {name!r} needs {key}, which config.json does not give")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(params.get("rope_theta") or raw.get("rope_theta") or _DEFAULT_THETA),
        factor=float(params.get("factor") or max_positions / original),
        original_max_position_embeddings=original,
        low_freq_factor=float(params.get("low_freq_factor") or 1.0),
        high_freq_factor=float(params.get("high_freq_factor") or 1.0),
        attention_factor=params.get("attention_factor"),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        mscale=float(params.get("mscale") or 0.0),
        mscale_all_dim=float(params.get("mscale_all_dim") or 0.0),
        rounds_correction_range=bool(params.get("truncate", True)),
    )


def _positive(raw: Mapping[str, Any], key: str, *, at_most: int | None = None) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} is {value!r}, not a positive number")
    if at_most is not None and value > at_most:
        raise UnsupportedModel(f"{key}: {value} is not supported, only up to {at_most}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFunction:
    """Function of a layer from the product of a query and a key to a score before the softmax."""

    scale: float | None = None
    """Factor; None: 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Bound c of a scaled score s, which becomes c * tanh(s / c), as in Gemma 2 (arXiv:2408.00118); None: no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Outer shape of a decoder that transformers computes, and the demands of its layers on attention.

    Found by a trial run (`engine.model.transformers_trial`), since config.json has many names for them.
    """

    architecture: str
    """Class name in transformers, such as "Gemma2ForCausalLM"."""
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Length up to which the rotary frequencies do not change."""
    windows: tuple[int | None, ...]
    """Window of each layer: number of tokens that a token attends to, itself included; None: all."""
    scores: tuple[ScoreFunction, ...]
    """Score function of each layer."""
    source: str
    """Digest of config.json and the version of transformers, for everything else that the arithmetic depends on."""

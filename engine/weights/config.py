"""Configurations of decoders: our own, from config.json, and those that transformers computes, from a trial run.

Our architectures differ in a handful of switches of `DecoderConfig`; later code does not check their names. Keys
that a config omits get the defaults of the architecture's reference implementation. Settings that change the arithmetic
and are not implemented are refused here, by name, before a weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.weights.architectures import (
    ARCHITECTURES,
    Activation,
    Architecture,
    MlpNames,
    Recurrence,
    language_part,
)
from engine.weights.config_json import MAX_LAYERS, MAX_SIZE, UnsupportedModel, count, positive, read_json
from engine.weights.delta import parse_delta
from engine.weights.experts import ExpertsConfig, parse_experts
from engine.weights.latent import LatentConfig, parse_latent
from engine.weights.mamba import parse_mamba
from engine.weights.nemotron import stacked_layers
from engine.weights.nope import NopeConfig, parse_nope
from engine.weights.recurrent import RecurrentConfig
from engine.weights.rope_config import RopeConfig, RopeType, longest_text, parse_ropes, rotary_dim
from engine.weights.windows import parse_windows
from engine.window import Window

__all__ = [
    "DecoderConfig",
    "ScoreFunction",
    "TransformersConfig",
    "UnsupportedModel",
    "for_length",
    "is_native",
    "parse_config",
    "read_json",
]


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
    windows: tuple[Window | None, ...]
    """Window of each layer; None: a token attends to all before it."""
    rope: RopeConfig
    experts: ExpertsConfig | None = None
    """None: every layer has an MLP."""
    latent: LatentConfig | None = None
    """Latent attention: one key head, of the size of its rows; None: layers have keys and values."""
    recurrent: RecurrentConfig | None = None
    """Recurrent layers; None: every layer has attention."""
    num_draft_layers: int = 0
    """Layers behind the last one in a checkpoint, which the model does without."""
    windowed_rope: RopeConfig | None = None
    """Rotary embedding of layers with a window; None: `rope`."""
    nope: NopeConfig | None = None
    """Layers without rotary embedding; None: all layers have it."""
    has_interleaved_pairs: bool = False
    """Whether a checkpoint has the rows of queries and keys in pairs that are turned together; they are read in another
    order (`engine.model.checkpoints.turned_rows`)."""
    attention_scale: float | None = None
    """Factor of scores; None: 1 / sqrt(head_dim)."""
    lone_layers: tuple[int, ...] = ()
    """Layers without MLP or experts."""
    has_single_blocks: bool = False
    """Whether a checkpoint has mixers and MLPs as layers of their own (`engine.model.checkpoints.single_blocks`)."""
    mlp: MlpNames = MlpNames()  # noqa: RUF009 - frozen
    activation: Activation = Activation.SILU
    """Function of an MLP's gate, or of its inner values where it has none."""
    embedding_scale: float = 1.0
    """Factor of embeddings, rounded to the weights' dtype."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logits_divisor: float = 1.0
    has_offset_norms: bool = False
    """Whether a checkpoint has norms' weights less one. Such a norm is rounded behind its weight, others before it."""
    has_output_norms: bool = False
    """Whether what attention and MLP add to the residual stream is normalised first."""
    rotary_dim: int | None = None
    """Values of a head that are rotated, the first ones; None: all."""
    has_gated_attention: bool = False
    """Whether what a head attends to is multiplied by the sigmoid of a gate, whose rows follow its query's."""
    has_sinks: bool = False
    """Whether a learned logit of each query head joins its softmax (attention sinks)."""

    @property
    def score_scale(self) -> float:
        """Factor of scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def rope_of(self, layer_idx: int) -> RopeConfig | None:
        """Return the rotary embedding of a layer; None: it has none."""
        if self.nope is not None and layer_idx in self.nope.layers:
            return None
        return self.rope if self.windowed_rope is None or self.windows[layer_idx] is None else self.windowed_rope

    def recurrent_of(self, layer_idx: int) -> RecurrentConfig | None:
        """Return what a layer has in place of attention; None: it has attention."""
        return None if self.recurrent is None or layer_idx not in self.recurrent.layers else self.recurrent

    def experts_of(self, layer_idx: int) -> ExpertsConfig | None:
        """Return the experts of a layer; None: it has an MLP."""
        return None if self.experts is None or layer_idx in self.experts.dense_layers else self.experts

    @property
    def kv_windows(self) -> tuple[Window | None, ...]:
        """Window of each layer of the pages."""
        return self.windows

    @property
    def rounds_norms_last(self) -> bool:
        """Whether a norm is rounded behind its weight, and not before it."""
        return self.has_offset_norms or self.has_single_blocks

    @property
    def has_gates(self) -> bool:
        """Whether MLPs have gates."""
        return self.activation.has_gate

    @property
    def kv_parts_per_layer(self) -> int:
        """See `KvShape`."""
        return 2 if self.latent is None else 1

    @property
    def rope_dim(self) -> int:
        """Values of a head that are rotated."""
        return (self.rotary_dim or self.head_dim) if self.latent is None else self.latent.rope_dim

    @property
    def attended_size(self) -> int:
        """Values of all heads after attention."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def gated_sizes(self) -> set[int]:
        """Sizes of MLPs and experts, between their projections."""
        if self.experts is None:
            return {self.intermediate_size}
        sizes = {self.experts.intermediate_size, self.experts.shared_size}
        return {*sizes, self.intermediate_size} - {0} if self.experts.dense_layers else sizes - {0}

    @property
    def largest_intermediate_size(self) -> int:
        """Size of the largest MLP or expert."""
        if self.experts is None:
            return self.intermediate_size
        return max(self.intermediate_size, self.experts.intermediate_size, self.experts.shared_size)

    def multiplied_size(self, layer_idx: int) -> int:
        """Return the size of a layer's MLP, or of the experts of one token; without a gate it counts as two thirds."""
        experts, size = self.experts_of(layer_idx), self.intermediate_size
        if layer_idx in self.lone_layers:
            return 0
        if experts is not None:
            size = experts.intermediate_size * experts.num_chosen + experts.shared_size
        return size * (2 + self.has_gates) // 3


_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def is_native(raw: Mapping[str, Any], device_type: str) -> bool:
    """Whether our own decoder computes the model that a config.json describes; recurrent layers only on CPUs."""
    names = language_part(raw).get("architectures") or ()
    found = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    return any(device_type == "cpu" or each.recurrence is None for each in found)


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises UnsupportedModel, naming the unsupported feature."""
    raw = language_part(raw)
    architecture = _architecture(raw)
    if architecture.has_single_blocks:
        raw = stacked_layers(raw)
    key, expected = architecture.activation_key, architecture.activation.value
    if (raw.get(key) or expected) != expected:
        raise UnsupportedModel(f"{key}: {raw[key]!r} is not supported, only {expected!r}")
    for key in _UNSUPPORTED:
        if raw.get(key):
            raise UnsupportedModel(f"{key}: {raw[key]} is not supported")
    num_heads = positive(raw, "num_attention_heads")
    latent = parse_latent(raw) if architecture.has_latent_attention else None
    num_kv_heads = raw.get("num_key_value_heads", architecture.default_num_kv_heads) or num_heads
    if latent is not None:
        num_kv_heads = 1
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"{num_heads} query heads do not divide among {num_kv_heads} key heads")
    hidden_size = positive(raw, "hidden_size", at_most=MAX_SIZE)
    head_dim = raw.get("head_dim") or architecture.default_head_dim or hidden_size // num_heads
    if latent is not None:
        head_dim = latent.row_size
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim: {head_dim} is odd; rotary embedding turns pairs")
    rope, windowed_rope = parse_ropes(raw, architecture)
    has_attention_bias = bool(raw.get("attention_bias", architecture.default_attention_bias))
    follows_config = architecture.has_qkv_bias is None
    experts = None if architecture.experts is None else parse_experts(raw, architecture.experts)
    default_size = None if experts is None or experts.dense_layers else experts.intermediate_size

    def multiplier(key: str) -> float:
        return _factor(raw, key) if architecture.has_multipliers else 1.0

    return DecoderConfig(
        vocab_size=positive(raw, "vocab_size", at_most=MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=positive(raw, architecture.mlp_size, default=default_size, at_most=MAX_SIZE),
        num_layers=positive(raw, "num_hidden_layers", at_most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=longest_text(raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", architecture.default_eps)),
        has_qkv_bias=has_attention_bias if follows_config else bool(architecture.has_qkv_bias),
        has_output_bias=has_attention_bias and follows_config,
        has_mlp_bias=architecture.reads_mlp_bias and bool(raw.get("mlp_bias", False)),
        has_qk_norm=architecture.has_qk_norm,
        has_tied_embeddings=bool(raw.get("tie_word_embeddings", architecture.default_has_tied_embeddings)),
        windows=parse_windows(raw, architecture),
        rope=rope,
        experts=experts,
        has_sinks=architecture.has_sinks,
        latent=latent,
        recurrent=_recurrent(raw, architecture),
        num_draft_layers=count(raw, architecture.draft_layers) if architecture.draft_layers else 0,
        windowed_rope=windowed_rope,
        nope=parse_nope(raw, architecture, rope),
        has_interleaved_pairs=architecture.has_interleaved_pairs,
        attention_scale=_attention_scale(raw, architecture, latent, rope),
        lone_layers=tuple(raw.get("lone_layers") or ()) if architecture.has_single_blocks else (),
        has_single_blocks=architecture.has_single_blocks,
        mlp=architecture.mlp,
        activation=architecture.activation,
        embedding_scale=hidden_size**0.5 if architecture.has_scaled_embeddings else multiplier("embedding_multiplier"),
        residual_scale=multiplier("residual_multiplier"),
        logits_divisor=multiplier("logits_scaling"),
        has_offset_norms=architecture.has_offset_norms,
        has_output_norms=architecture.has_output_norms,
        rotary_dim=rotary_dim(raw, architecture, head_dim),
        has_gated_attention=architecture.has_gated_attention,
    )


def for_length(config: DecoderConfig, num_tokens: int) -> DecoderConfig:
    """Return the decoder for texts of so many tokens: dynamic frequencies are those of the longest text, for all."""
    rope, windowed = config.rope.for_length(num_tokens, config.rope_dim), config.windowed_rope
    windowed = None if windowed is None else windowed.for_length(num_tokens, config.rope_dim)
    return replace(config, rope=rope, windowed_rope=windowed)


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(names) or f"none named (model_type: {raw.get('model_type')!r})"
    raise UnsupportedModel(f"architecture {found} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _factor(raw: Mapping[str, Any], key: str) -> float:
    factor = raw.get(key, 1.0)
    if not isinstance(factor, int | float) or factor <= 0:
        raise UnsupportedModel(f"config.json: {key} is {factor!r}, not a positive number")
    return float(factor)


def _attention_scale(
    raw: Mapping[str, Any], architecture: Architecture, latent: LatentConfig | None, rope: RopeConfig
) -> float | None:
    if latent is not None:
        # What is rotated is a part of a head alone: the other part has no factor on cos and sin.
        is_stretched = rope.rope_type is not RopeType.DEFAULT and rope.mscale_all_dim
        factor = rope.sharpness(rope.mscale_all_dim) ** 2 if is_stretched else 1.0
        return float(latent.query_dim**-0.5 * factor)
    if architecture.has_multipliers:
        return _factor(raw, "attention_multiplier")
    if architecture.default_query_scalar is None:
        return None
    return float(positive(raw, "query_pre_attn_scalar", default=architecture.default_query_scalar) ** -0.5)


def _recurrent(raw: Mapping[str, Any], architecture: Architecture) -> RecurrentConfig | None:
    match architecture.recurrence:
        case None:
            return None
        case Recurrence.DELTA | Recurrence.GROUPED_DELTA:
            return parse_delta(raw, is_grouped=architecture.recurrence is Recurrence.GROUPED_DELTA)
        case Recurrence.MAMBA:
            return parse_mamba(raw)


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
    windows: tuple[Window | None, ...]
    """Window of each layer; None: a token attends to all before it."""
    scores: tuple[ScoreFunction, ...]
    """Score function of each layer."""
    kv_layers: tuple[int, ...]
    """Layer of the pages that each layer reads and writes; layers that share keys and values have one."""
    kv_parts_per_layer: ClassVar[int] = 2
    """See `KvShape`."""
    recurrent: ClassVar[RecurrentConfig | None] = None
    source: str
    """Digest of config.json and the version of transformers, for everything else that the arithmetic depends on."""

    @property
    def kv_windows(self) -> tuple[Window | None, ...]:
        """Window of each layer of the pages."""
        return tuple(self.windows[self.kv_layers.index(kv_layer)] for kv_layer in sorted(set(self.kv_layers)))

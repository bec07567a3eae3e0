"""Layers without rotary embedding (NoPE), perhaps beside others that have it: what config.json says of both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.weights.architectures import Architecture
from engine.weights.config_json import MAX_LAYERS, UnsupportedModel, positive
from engine.weights.rope_config import RopeConfig, RopeType

_DEFAULT_STRENGTH, _DEFAULT_TOKENS = 0.1, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Growth of queries with their position p, to 1 + strength * log(1 + floor((p + 1) / num_tokens)) times as much.

    It keeps the softmax over many keys as sharp as over few (arXiv:2501.19399).
    """

    strength: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NopeConfig:
    """Some layers have no rotary embedding."""

    layers: tuple[int, ...]
    """Those that have none."""
    query_growth: QueryGrowth | None
    """Growth of their queries; None: there is none."""
    has_norms_elsewhere: bool
    """Whether queries and keys of the other layers are normalised, without weights."""


def parse_nope(raw: Mapping[str, Any], architecture: Architecture, rope: RopeConfig) -> NopeConfig | None:
    """Return the layers without the rotary embedding `rope`; None: all have it. Raises UnsupportedModel."""
    if architecture.has_position_type and raw.get("position_embedding_type") != "rope":
        all_layers = tuple(range(positive(raw, "num_hidden_layers", at_most=MAX_LAYERS)))
        return NopeConfig(layers=all_layers, query_growth=None, has_norms_elsewhere=False)
    if architecture.default_nope_interval is None:
        return None
    has_norms = bool(raw.get("use_qk_norm", True))
    if has_norms and rope.rope_type is RopeType.YARN:  # a norm behind the rotation would take YaRN's factor back
        raise UnsupportedModel("use_qk_norm: norms behind rotary embedding of type 'yarn' are not supported")
    growth = None
    if raw.get("attn_temperature_tuning", True):
        growth = QueryGrowth(
            strength=float(raw.get("attn_scale", _DEFAULT_STRENGTH)),
            num_tokens=positive(raw, "floor_scale", default=_DEFAULT_TOKENS),
        )
    return NopeConfig(layers=nope_layers(raw, architecture), query_growth=growth, has_norms_elsewhere=has_norms)


def nope_layers(raw: Mapping[str, Any], architecture: Architecture) -> tuple[int, ...]:
    """Return the layers without rotary embedding. Raises UnsupportedModel."""
    num_layers = positive(raw, "num_hidden_layers", at_most=MAX_LAYERS)
    interval = positive(raw, "no_rope_layer_interval", default=architecture.default_nope_interval)
    is_rotated = raw.get("no_rope_layers") or [(layer_idx + 1) % interval for layer_idx in range(num_layers)]
    if len(is_rotated) < num_layers:
        raise UnsupportedModel(f"no_rope_layers names {len(is_rotated)} layers of {num_layers}")
    return tuple(layer_idx for layer_idx in range(num_layers) if not is_rotated[layer_idx])

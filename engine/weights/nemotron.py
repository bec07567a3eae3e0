"""Nemotron-H, whose layers are a mixer, an MLP or experts each, as a decoder whose layers are a mixer and an MLP."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from engine.weights.config_json import MAX_LAYERS, UnsupportedModel

_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of `hybrid_override_pattern`
_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}  # newer ones of `layers_block_type`
_MLPS = ("mlp", "moe")
# Keys of other models that mean the same.
_KEYS = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
_LEAST_TIME_STEP = 0.001


def stacked_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as other models have it: an MLP belongs to the layer before it. Raises UnsupportedModel.

    `layer_types` are the kinds of mixers, `lone_layers` those without MLP or experts.
    """
    kinds = _kinds(raw)
    if any(kind in _MLPS and before in ("", *_MLPS) for before, kind in pairwise(["", *kinds])):
        raise UnsupportedModel(f"{_stated_by(raw)}: an MLP that follows no mixer is not supported")
    if raw.get("moe_latent_size") is not None:
        raise UnsupportedModel(f"moe_latent_size: {raw['moe_latent_size']} is not supported")
    if raw.get("mamba_hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"mamba_hidden_act: {raw['mamba_hidden_act']!r} is not supported, only 'silu'")
    mixers = [kind for kind in kinds if kind not in _MLPS]
    if "mamba" not in mixers:
        raise UnsupportedModel(f"{_stated_by(raw)}: a model without Mamba layers is not supported")
    if len(kinds) > MAX_LAYERS:
        raise UnsupportedModel(f"{_stated_by(raw)}: {len(kinds)} layers are not supported, only up to {MAX_LAYERS}")
    followers = [after for kind, after in pairwise([*kinds, ""]) if kind not in _MLPS]
    renamed = {ours: raw[theirs] for theirs, ours in _KEYS.items() if theirs in raw}
    return {
        **raw,
        **renamed,
        "num_hidden_layers": len(mixers),
        "layer_types": mixers,
        "lone_layers": [layer_idx for layer_idx, after in enumerate(followers) if after not in _MLPS],
        "mlp_only_layers": [layer_idx for layer_idx, after in enumerate(followers) if after != "moe"],
        "n_routed_experts": raw.get("n_routed_experts") if "moe" in kinds else 0,
        "time_step_limit": [raw.get("time_step_min", _LEAST_TIME_STEP), float("inf")],
    }


def _stated_by(raw: Mapping[str, Any]) -> str:
    return "hybrid_override_pattern" if "hybrid_override_pattern" in raw else "layers_block_type"


def _kinds(raw: Mapping[str, Any]) -> list[str]:
    stated = raw.get("hybrid_override_pattern") or raw.get("layers_block_type") or raw.get("layer_types") or ()
    kinds = [_KINDS.get(kind, _NAMES.get(kind, kind)) for kind in stated]
    unknown = sorted(set(kinds) - {"mamba", "attention", *_MLPS})
    if unknown or not kinds:
        raise UnsupportedModel(f"{_stated_by(raw)}: {', '.join(unknown) or 'no layer'} is not supported")
    return kinds

"""Rotary embedding as config.json describes it.

New files have `rope_parameters`; older ones have `rope_theta` and perhaps `rope_scaling`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from engine.weights.architectures import Architecture
from engine.weights.config_json import UnsupportedModel, positive


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

    def sharpness(self, mscale: float) -> float:
        """Return YaRN's factor on queries and on keys."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def for_length(self, num_tokens: int, head_dim: int) -> "RopeConfig":
        """Return the embedding for texts of so many tokens: dynamic frequencies are those of the longest text."""
        stretch = self.factor * num_tokens / self.original_max_position_embeddings - self.factor + 1
        if self.rope_type is not RopeType.DYNAMIC or stretch <= 1:
            return self
        return replace(self, theta=self.theta * stretch ** (head_dim / (head_dim - 2)))


def parse_ropes(raw: Mapping[str, Any], architecture: Architecture) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding of all layers, or of those without a window, then that of the others.

    Raises UnsupportedModel, naming the unsupported feature.
    """
    params, windowed = _stated(raw), None
    parts = [] if architecture.default_rotary_part is not None else [raw, params]
    if architecture.default_windowed_theta is not None:
        by_kind = raw.get("rope_parameters") or {}
        # The old spelling stretches only layers without a window.
        params = {**(by_kind.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
        theta = raw.get("rope_local_base_freq") or architecture.default_windowed_theta
        parts += by_kind.values()
        windowed = _parse(raw, by_kind.get("sliding_attention") or {}, theta)
    if any(isinstance(value, Mapping) for value in params.values()):
        raise UnsupportedModel("rope_parameters that differ by layer are not supported")
    if any((part.get("partial_rotary_factor") or 1.0) != 1.0 for part in parts):
        raise UnsupportedModel("partial_rotary_factor is not supported")
    return _parse(raw, params, raw.get("rope_theta") or architecture.default_theta), windowed


def rotary_dim(raw: Mapping[str, Any], architecture: Architecture, head_dim: int) -> int | None:
    """Return how many values of a head are rotated; None: all. Raises UnsupportedModel."""
    if architecture.default_rotary_part is None:
        return None
    stated = _stated(raw).get("partial_rotary_factor") or raw.get("partial_rotary_factor")
    part = float(stated or architecture.default_rotary_part)
    size = int(head_dim * part)
    if not 0 < size <= head_dim or size % 2:
        raise UnsupportedModel(f"partial_rotary_factor: {part} of {head_dim} values are no pairs")
    return None if size == head_dim else size


def longest_text(raw: Mapping[str, Any]) -> int:
    """Return the tokens that a config.json's positions are good for. Raises UnsupportedModel.

    `max_position_embeddings` is the trained length where frequencies are stretched by a factor, and the stretched one
    for the other ways, also where only some layers' are.
    """
    trained = positive(raw, "max_position_embeddings")
    params = {} if "rope_local_base_freq" in raw else _stated(raw)
    name, factor = params.get("rope_type", params.get("type")), params.get("factor")
    if not isinstance(factor, int | float):
        return trained
    if name == "yarn":
        return int((params.get("original_max_position_embeddings") or trained) * factor)
    return int(trained * factor) if name in ("linear", "dynamic") else trained


def _stated(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def _parse(raw: Mapping[str, Any], params: Mapping[str, Any], theta: float) -> RopeConfig:
    name = params.get("rope_type", params.get("type", "default"))
    if name not in {kind.value for kind in RopeType}:
        raise UnsupportedModel(f"rope_type: {name!r} is not supported")
    rope_type = RopeType(name)
    max_positions = positive(raw, "max_position_embeddings")
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
        theta=float(params.get("rope_theta") or theta),
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

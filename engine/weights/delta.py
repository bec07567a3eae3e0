"""Gated delta nets (arXiv:2412.06464): what config.json says of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.weights.config_json import MAX_LAYERS, MAX_SIZE, UnsupportedModel, positive

_MAX_KERNEL_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Values of each key head in a row: those of head h begin at `begin` + h * `stride`."""

    begin: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaFeatures:
    """Places of the values in the products of a token with `LayerWeights.qkv`."""

    query: Features
    key: Features
    value: Features
    gate: Features
    """Values that gate the results."""
    rate: Features
    """One for each value head: how far a token's value replaces what its key finds in the state."""
    decay: Features
    """One for each value head: how much of the state a token leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Layers that write a token's value to a matrix under its key, in place of what the key finds there.

    Such a matrix, [key_dim, value_dim], is the state of each value head. Some value heads share a query and a key.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_heads: int
    """Value heads."""
    key_dim: int
    value_dim: int
    kernel_size: int
    is_grouped: bool
    """Whether the products have all values of a key head side by side, and not those of all heads."""

    module: ClassVar[str] = "linear_attn"
    output: ClassVar[str] = "out_proj"
    has_bias: ClassVar[bool] = False
    has_convolution_bias: ClassVar[bool] = False
    has_skip: ClassVar[bool] = False

    @property
    def key_size(self) -> int:
        """Values of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def output_size(self) -> int:
        """See `RecurrentConfig`."""
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """See `RecurrentConfig`; queries, keys, values."""
        return 2 * self.key_size + self.output_size

    @property
    def state_size(self) -> int:
        """See `RecurrentConfig`; behind the convolution's inputs lie the matrices of the heads."""
        return (self.kernel_size - 1) * self.num_channels + self.num_heads * self.key_dim * self.value_dim

    @property
    def norm_size(self) -> int:
        """See `RecurrentConfig`; one for all heads."""
        return self.value_dim

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """See `RecurrentConfig`."""
        values, heads = self.output_size, self.num_heads
        if self.is_grouped:
            return (("in_proj_qkvz", self.num_channels + values), ("in_proj_ba", 2 * heads))
        return (
            *(("in_proj_qkv", self.num_channels), ("in_proj_z", values)),
            *(("in_proj_b", heads), ("in_proj_a", heads)),
        )

    @property
    def features(self) -> DeltaFeatures:
        """Places in the products."""
        heads = self.num_heads // self.num_key_heads
        sizes = (self.key_dim, self.key_dim, heads * self.value_dim, heads * self.value_dim)
        if self.is_grouped:
            projections: tuple[tuple[int, ...], ...] = (sizes, (heads, heads))
        else:
            projections = tuple((size,) for size in (*sizes, heads, heads))
        places, begin = [], 0
        for parts in projections:
            places += [
                Features(begin=begin + sum(parts[:i]), stride=sum(parts), size=size) for i, size in enumerate(parts)
            ]
            begin += self.num_key_heads * sum(parts)
        query, key, value, gate, rate, decay = places
        return DeltaFeatures(query=query, key=key, value=value, gate=gate, rate=rate, decay=decay)


def parse_delta(raw: Mapping[str, Any], *, is_grouped: bool) -> DeltaConfig | None:
    """Return the delta nets that a config.json describes; None: it has none. Raises UnsupportedModel."""
    layers = _layers(raw)
    if not layers:
        return None
    num_key_heads = positive(raw, "linear_num_key_heads", default=16, at_most=MAX_SIZE)
    num_heads = positive(raw, "linear_num_value_heads", default=32, at_most=MAX_SIZE)
    if num_heads % num_key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads: {num_heads} do not divide among linear_num_key_heads: {num_key_heads}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act: {raw['hidden_act']!r} is not supported in delta nets, only 'silu'")
    return DeltaConfig(
        layers=layers,
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=positive(raw, "linear_key_head_dim", default=128, at_most=MAX_SIZE),
        value_dim=positive(raw, "linear_value_head_dim", default=128, at_most=MAX_SIZE),
        kernel_size=positive(raw, "linear_conv_kernel_dim", default=4, at_most=_MAX_KERNEL_SIZE),
        is_grouped=is_grouped,
    )


def _layers(raw: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers without attention: without `layer_types` all but every so many'th."""
    num_layers = positive(raw, "num_hidden_layers", at_most=MAX_LAYERS)
    interval = positive(raw, "full_attention_interval", default=4)
    default = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)]
    layer_types = raw.get("layer_types") or default
    unknown = sorted(set(layer_types) - {"full_attention", "linear_attention"})
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(unknown)} is not supported")
    if len(layer_types) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(layer_types)} layers of {num_layers}")
    if "full_attention" not in layer_types:
        raise UnsupportedModel("layer_types: models without any full_attention are not supported")
    return frozenset(i for i, kind in enumerate(layer_types) if kind == "linear_attention")

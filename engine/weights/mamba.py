"""Mamba-2 layers (arXiv:2405.21060): what config.json says of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.weights.config_json import MAX_LAYERS, MAX_SIZE, UnsupportedModel, positive

_MAX_KERNEL_SIZE = 64
_RECURRENT, _ATTENDING = ("mamba", "linear_attention"), ("attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Shapes of Mamba-2 layers; a `RecurrentConfig`.

    The products of a token are its gates [output_size], what the convolution takes [num_channels], and the time steps
    of the heads [num_heads]. The convolution gives the inputs of the heads [num_heads, head_dim], then for each group
    of heads what writes these to the states and what reads the states, [num_groups, state_dim] each.
    """

    layers: frozenset[int]
    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of consecutive heads, which also are those of the norm of the results."""
    state_dim: int
    """Values of a state for each input of its head."""
    kernel_size: int
    has_bias: bool
    has_convolution_bias: bool
    time_step_limits: tuple[float, float]
    """Least and largest time step."""

    module: ClassVar[str] = "mamba"
    output: ClassVar[str] = "out_proj"
    has_skip: ClassVar[bool] = True

    @property
    def output_size(self) -> int:
        """See `RecurrentConfig`."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Values of a token, all groups, that write inputs to states, or read states."""
        return self.num_groups * self.state_dim

    @property
    def num_channels(self) -> int:
        """See `RecurrentConfig`."""
        return self.output_size + 2 * self.group_size

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """See `RecurrentConfig`."""
        return (("in_proj", self.output_size + self.num_channels + self.num_heads),)

    @property
    def conv_state_size(self) -> int:
        """Values of a state that are inputs of the convolution."""
        return (self.kernel_size - 1) * self.num_channels

    @property
    def state_size(self) -> int:
        """See `RecurrentConfig`; behind the convolution's inputs lie the states of the heads, [head_dim, state_dim]."""
        return self.conv_state_size + self.output_size * self.state_dim

    @property
    def norm_size(self) -> int:
        """See `RecurrentConfig`."""
        return self.output_size


def parse_mamba(raw: Mapping[str, Any]) -> MambaConfig | None:
    """Return the Mamba-2 layers that a config.json describes; None: it has none. Raises UnsupportedModel."""
    layers = _layers(raw)
    if not layers:
        return None
    num_heads, num_groups = positive(raw, "mamba_n_heads", default=128), positive(raw, "mamba_n_groups", default=1)
    size = positive(raw, "mamba_expand", default=2) * positive(raw, "hidden_size", at_most=MAX_SIZE)
    if raw.get("mamba_d_head", "auto") != "auto":
        size = positive(raw, "mamba_d_head", at_most=MAX_SIZE) * num_heads
    if size % num_heads or num_heads % num_groups:
        raise UnsupportedModel(
            f"mamba_n_heads: {num_heads} does not divide {size} values, or mamba_n_groups: {num_groups} not the heads"
        )
    return MambaConfig(
        layers=layers,
        num_heads=num_heads,
        head_dim=size // num_heads,
        num_groups=num_groups,
        state_dim=positive(raw, "mamba_d_state", default=256, at_most=MAX_SIZE),
        kernel_size=positive(raw, "mamba_d_conv", default=4, at_most=_MAX_KERNEL_SIZE),
        has_bias=bool(raw.get("mamba_proj_bias", False)),
        has_convolution_bias=bool(raw.get("mamba_conv_bias", True)),
        time_step_limits=_limits(raw),
    )


def _limits(raw: Mapping[str, Any]) -> tuple[float, float]:
    """Return the limits of time steps. JSON knows no infinity, which transformers spells as an object."""
    stated = raw.get("time_step_limit") or (0.0, math.inf)
    try:
        least, most = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in stated)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"time_step_limit: {stated!r} is not a pair of numbers") from error
    return least, most


def _layers(raw: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers without attention: without `layer_types` all."""
    num_layers = positive(raw, "num_hidden_layers", at_most=MAX_LAYERS)
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or [_RECURRENT[0]] * num_layers
    unknown = sorted(set(kinds).difference(_RECURRENT, _ATTENDING))
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(unknown)} is not supported")
    if len(kinds) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(kinds)} layers of {num_layers}")
    if not set(kinds).intersection(_ATTENDING):
        raise UnsupportedModel("layer_types names no layer with attention; models without any are refused")
    return frozenset(layer_idx for layer_idx, kind in enumerate(kinds) if kind in _RECURRENT)

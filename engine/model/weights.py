"""A decoder's parameters, with projections of the same input fused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import DecoderConfig


class Projection(Protocol):
    """A matrix product with weights of some kind."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features], for x [num_tokens, in_features]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A projection as the checkpoint has it: weight [out_features, in_features], bias [out_features] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One layer. Faster or smaller projections may replace the plain ones after loading."""

    input_norm: Tensor
    qkv: Projection
    """Rows of query, key, value, in this order."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Projection
    post_attention_norm: Tensor
    gate_up: Projection
    """Rows of gate, then up."""
    down: Projection


@dataclass(slots=True, kw_only=True)
class DecoderWeights:
    """All layers, all of one dtype on one device."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Projection
    """[vocab_size, hidden_size]; its weight is the embedding itself when they are tied."""

    def plain_projections(self) -> Iterator[Linear]:
        """Yield the projections that were not replaced."""
        for layer in self.layers:
            projections = (getattr(layer, name) for name in _PROJECTIONS)
            yield from (each for each in projections if isinstance(each, Linear))
        if isinstance(self.head, Linear):
            yield self.head

    def replace_projections(self, convert: Callable[[Linear], Projection]) -> None:
        """Replace every plain projection by `convert(linear)`, one by one: two whole copies never exist."""
        for layer in self.layers:
            for name in _PROJECTIONS:
                if isinstance(projection := getattr(layer, name), Linear):
                    setattr(layer, name, convert(projection))
        if isinstance(self.head, Linear):
            self.head = convert(self.head)


_PROJECTIONS = ("qkv", "output", "gate_up", "down")


def plain(projection: Projection) -> Linear:
    """Return a projection that was not replaced."""
    assert isinstance(projection, Linear), f"{projection} was replaced"
    return projection


def allocate_weights(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Return uninitialised weights, to be filled through `checkpoint_views`."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(out_features: int, in_features: int, num_biases: int) -> Linear:
        return Linear(weight=empty(out_features, in_features), bias=empty(out_features) if num_biases else None)

    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=empty(config.hidden_size),
            qkv=linear(q_size + 2 * kv_size, config.hidden_size, config.has_qkv_bias),
            q_norm=empty(config.head_dim) if config.has_qk_norm else None,
            k_norm=empty(config.head_dim) if config.has_qk_norm else None,
            output=linear(config.hidden_size, q_size, config.has_output_bias),
            post_attention_norm=empty(config.hidden_size),
            gate_up=linear(2 * config.intermediate_size, config.hidden_size, config.has_mlp_bias),
            down=linear(config.hidden_size, config.intermediate_size, config.has_mlp_bias),
        )
        for _ in range(config.num_layers)
    )
    embedding = empty(config.vocab_size, config.hidden_size)
    head = embedding if config.has_tied_embeddings else empty(config.vocab_size, config.hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=empty(config.hidden_size),
        head=Linear(weight=head, bias=None),
    )


def checkpoint_views(weights: DecoderWeights, config: DecoderConfig) -> dict[str, Tensor]:
    """Return the part of the weights that each tensor name of a Hugging Face checkpoint fills."""
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.has_tied_embeddings:
        views["lm_head.weight"] = plain(weights.head).weight
    for layer_idx, layer in enumerate(weights.layers):
        views.update({f"model.layers.{layer_idx}.{name}": view for name, view in _layer_views(layer, config).items()})
    return views


def _layer_views(layer: LayerWeights, config: DecoderConfig) -> dict[str, Tensor]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): (layer.qkv, [q_size, kv_size, kv_size]),
        ("self_attn.o_proj",): (layer.output, [config.hidden_size]),
        ("mlp.gate_proj", "mlp.up_proj"): (layer.gate_up, [config.intermediate_size] * 2),
        ("mlp.down_proj",): (layer.down, [config.hidden_size]),
    }
    views = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_attention_norm,
    }
    for names, (projection, sizes) in projections.items():
        linear = plain(projection)
        for name, view in zip(names, linear.weight.split_with_sizes(sizes), strict=True):
            views[f"{name}.weight"] = view
        if linear.bias is not None:
            for name, view in zip(names, linear.bias.split_with_sizes(sizes), strict=True):
                views[f"{name}.bias"] = view
    if layer.q_norm is not None and layer.k_norm is not None:
        views["self_attn.q_norm.weight"] = layer.q_norm
        views["self_attn.k_norm.weight"] = layer.k_norm
    return views

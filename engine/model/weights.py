"""A decoder's parameters, with projections of the same input fused."""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import DecoderConfig


class Projection(Protocol):
    """A matrix product with weights of some kind."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that every product reads."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features], for x [num_tokens, in_features]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A projection as the checkpoint has it: weight [out_features, in_features], bias [out_features] or None."""

    weight: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        """See `Projection`."""
        return self.weight.nbytes

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

    def projections(self) -> Iterator[Projection]:
        """Yield the layers' projections, then the head."""
        for layer in self.layers:
            yield from (getattr(layer, name) for name in _PROJECTIONS)
        yield self.head

    @property
    def num_bytes(self) -> int:
        """Bytes of all projections, which every step reads once."""
        return sum(projection.num_bytes for projection in self.projections())

    def replace_projections(self, convert: Callable[[Projection], Projection]) -> None:
        """Replace every projection by `convert(projection)`, one by one: two whole copies never exist."""
        self.convert_projections(lambda _field, projection: convert(projection))

    def convert_projections(self, convert: "Convert") -> None:
        """As `replace_projections`, with the projections' fields."""
        for layer in self.layers:
            for name in _PROJECTIONS:
                setattr(layer, name, convert(name, getattr(layer, name)))
        self.head = convert(HEAD_FIELD, self.head)


_PROJECTIONS = ("qkv", "output", "gate_up", "down")
HEAD_FIELD = "head"
Convert = Callable[[str, Projection], Projection]
"""Makes another projection of one, given its field in `LayerWeights`, or `HEAD_FIELD`."""


def plain(projection: Projection) -> Linear:
    """Return a projection that was not replaced."""
    assert isinstance(projection, Linear), f"{projection} was replaced"
    return projection


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedProjection:
    """A projection of every layer, and the modules of a Hugging Face checkpoint whose rows it joins."""

    field: str
    """Attribute of `LayerWeights`."""
    modules: tuple[str, ...]
    """Names below the layer's, in the order of their rows."""
    rows: tuple[int, ...]
    """Output features of each module."""
    in_features: int
    has_bias: bool


def fused_projections(config: DecoderConfig) -> tuple[FusedProjection, ...]:
    """Return the projections of a layer."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        FusedProjection(
            field="qkv",
            modules=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            rows=(q_size, kv_size, kv_size),
            in_features=config.hidden_size,
            has_bias=config.has_qkv_bias,
        ),
        FusedProjection(
            field="output",
            modules=("self_attn.o_proj",),
            rows=(config.hidden_size,),
            in_features=q_size,
            has_bias=config.has_output_bias,
        ),
        FusedProjection(
            field="gate_up",
            modules=("mlp.gate_proj", "mlp.up_proj"),
            rows=(config.intermediate_size,) * 2,
            in_features=config.hidden_size,
            has_bias=config.has_mlp_bias,
        ),
        FusedProjection(
            field="down",
            modules=("mlp.down_proj",),
            rows=(config.hidden_size,),
            in_features=config.intermediate_size,
            has_bias=config.has_mlp_bias,
        ),
    )


def allocate_weights(
    config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, without: Container[str] = ()
) -> DecoderWeights:
    """Return uninitialised weights, to be filled through `checkpoint_views`.

    Projections of the modules `without`, named as in a checkpoint, get no memory: their weights are on the meta device.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def weight(modules: Iterable[str], out_features: int, in_features: int) -> Tensor:
        if any(module in without for module in modules):
            return torch.empty((out_features, in_features), dtype=dtype, device="meta")
        return empty(out_features, in_features)

    def layer(layer_idx: int) -> LayerWeights:
        linears = {
            each.field: Linear(
                weight=weight(layer_modules(layer_idx, each), sum(each.rows), each.in_features),
                bias=empty(sum(each.rows)) if each.has_bias else None,
            )
            for each in fused_projections(config)
        }
        return LayerWeights(
            input_norm=empty(config.hidden_size),
            q_norm=empty(config.head_dim) if config.has_qk_norm else None,
            k_norm=empty(config.head_dim) if config.has_qk_norm else None,
            post_attention_norm=empty(config.hidden_size),
            **linears,
        )

    embedding = empty(config.vocab_size, config.hidden_size)
    head = embedding
    if not config.has_tied_embeddings:
        head = weight([HEAD_MODULE], config.vocab_size, config.hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(layer_idx) for layer_idx in range(config.num_layers)),
        final_norm=empty(config.hidden_size),
        head=Linear(weight=head, bias=None),
    )


HEAD_MODULE = "lm_head"
"""Name of the output head in a checkpoint."""


def layer_modules(layer_idx: int, projection: FusedProjection) -> list[str]:
    """Return the full names of a projection's modules in a checkpoint."""
    return [f"model.layers.{layer_idx}.{module}" for module in projection.modules]


def checkpoint_views(weights: DecoderWeights, config: DecoderConfig) -> dict[str, Tensor]:
    """Return the part of the weights that each tensor name of a Hugging Face checkpoint fills."""
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.has_tied_embeddings:
        views[f"{HEAD_MODULE}.weight"] = plain(weights.head).weight
    for layer_idx, layer in enumerate(weights.layers):
        views.update({f"model.layers.{layer_idx}.{name}": view for name, view in _layer_views(layer, config).items()})
    return views


def _layer_views(layer: LayerWeights, config: DecoderConfig) -> dict[str, Tensor]:
    views = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_attention_norm,
    }
    for each in fused_projections(config):
        linear = plain(getattr(layer, each.field))
        for module, view in zip(each.modules, linear.weight.split_with_sizes(each.rows), strict=True):
            views[f"{module}.weight"] = view
        if linear.bias is not None:
            for module, view in zip(each.modules, linear.bias.split_with_sizes(each.rows), strict=True):
                views[f"{module}.bias"] = view
    if layer.q_norm is not None and layer.k_norm is not None:
        views["self_attn.q_norm.weight"] = layer.q_norm
        views["self_attn.k_norm.weight"] = layer.k_norm
    return views

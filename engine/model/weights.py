"""A decoder's parameters, with the projections fused that read the same input."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import DecoderConfig


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with packed weights of this dtype on this CPU."""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not is_built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return weight.dtype is torch.float32


@dataclass(slots=True, kw_only=True)
class Linear:
    """A projection: weight [out_features, in_features], bias [out_features] or None."""

    weight: Tensor
    bias: Tensor | None
    _is_packed: bool = False

    def pack(self) -> None:
        """Replace the weight by oneDNN's blocked copy of it, in which it can no longer be read or loaded.

        A plain weight is rearranged inside every single matrix product; on CPU that is most of a decode step.
        """
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)  # noqa: SLF001 - its only name
        self._is_packed = True

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [num_tokens, out_features]."""
        if self._is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
                x, self.weight, self.bias, "none", [], ""
            )
            return product
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer."""

    input_norm: Tensor
    qkv: Linear
    """Rows of query, key, value, in this order."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    """Rows of gate, then up."""
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All layers, all of one dtype on one device."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    """[vocab_size, hidden_size]; its weight is the embedding itself when they are tied."""

    def pack(self) -> bool:
        """Rearrange all projections for the CPU, where this torch build can; returns whether it did."""
        if not _can_pack(self.embedding):
            return False
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.pack()
        self.head.pack()
        return True


def allocate_weights(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Return uninitialised weights; `checkpoint_views` says where a checkpoint's tensors go."""

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
    """Return, for each tensor name of a Hugging Face checkpoint, the part of the weights that it fills."""
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.has_tied_embeddings:
        views["lm_head.weight"] = weights.head.weight
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
    for names, (linear, sizes) in projections.items():
        for name, view in zip(names, linear.weight.split_with_sizes(sizes), strict=True):
            views[f"{name}.weight"] = view
        if linear.bias is not None:
            for name, view in zip(names, linear.bias.split_with_sizes(sizes), strict=True):
                views[f"{name}.bias"] = view
    if layer.q_norm is not None and layer.k_norm is not None:
        views["self_attn.q_norm.weight"] = layer.q_norm
        views["self_attn.k_norm.weight"] = layer.k_norm
    return views

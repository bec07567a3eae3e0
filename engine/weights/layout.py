"""Where the tensors of a Hugging Face checkpoint lie in a decoder's weights."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from engine.weights.architectures import MlpNames
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import (
    ROUTER_FIELD,
    DecoderWeights,
    GatedMlp,
    LatentWeights,
    LayerWeights,
    Linear,
    Moe,
    RecurrentWeights,
    plain,
)
from engine.weights.expert_stacks import ExpertStack, StackedMoe, padded_features
from engine.weights.experts import ExpertsConfig
from engine.weights.latent import LatentConfig
from engine.weights.recurrent import RecurrentConfig

HEAD_MODULE = "lm_head"
"""Name of the output head in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedProjection:
    """A projection of a layer, and the modules of a Hugging Face checkpoint whose rows it joins."""

    field: str
    """Attribute of `LayerWeights` or of what it holds."""
    modules: tuple[str, ...]
    """Full names, in the order of their rows."""
    rows: tuple[int, ...]
    """Output features of each module."""
    in_features: int
    has_bias: bool = False

    @property
    def out_features(self) -> int:
        """Rows of all modules."""
        return sum(self.rows)


def layer_projections(config: DecoderConfig, layer_idx: int) -> Iterator[FusedProjection]:
    """Yield the projections of a layer, in the order of `LayerWeights.places`."""
    prefix, hidden_size = f"model.layers.{layer_idx}", config.hidden_size
    recurrent = config.recurrent_of(layer_idx)
    if recurrent is not None:
        yield from _around_recurrence(recurrent, f"{prefix}.{recurrent.module}", hidden_size)
    else:
        yield from _before_attention(config, f"{prefix}.self_attn")
        yield FusedProjection(
            field="output",
            modules=(f"{prefix}.self_attn.o_proj",),
            rows=(hidden_size,),
            in_features=config.attended_size,
            has_bias=config.has_output_bias,
        )

    def mlp(names: MlpNames, size: int, *, has_bias: bool) -> Iterator[FusedProjection]:
        module = f"{prefix}.{names.module}"
        yield FusedProjection(
            field="gate_up",
            modules=tuple(f"{module}.{name}" for name in names.gate_up),
            rows=((1 + config.has_gates) * size // len(names.gate_up),) * len(names.gate_up),
            in_features=hidden_size,
            has_bias=has_bias,
        )
        down = f"{module}.{names.down}"
        yield FusedProjection(field="down", modules=(down,), rows=(hidden_size,), in_features=size, has_bias=has_bias)

    experts = config.experts_of(layer_idx)
    if layer_idx in config.lone_layers:
        return
    if experts is None:
        yield from mlp(config.mlp, config.intermediate_size, has_bias=config.has_mlp_bias)
        return
    module, (*gate_up, down) = f"{prefix}.{experts.module}", experts.projections

    def names(expert: str) -> MlpNames:
        return MlpNames(module=f"{experts.module}.{expert}", gate_up=tuple(gate_up), down=down)

    shared = experts.shared
    gates = [] if shared is None or shared.gate is None else [shared.gate]
    yield FusedProjection(
        field=ROUTER_FIELD,
        modules=(f"{module}.{experts.router}", *(f"{module}.{gate}" for gate in gates)),
        rows=(experts.num_experts, *(1 for _ in gates)),
        in_features=hidden_size,
        has_bias=experts.has_bias,
    )
    for i in range(experts.num_experts):
        yield from mlp(names(f"experts.{i}"), experts.intermediate_size, has_bias=experts.has_bias)
    if shared is not None:
        yield from mlp(shared.beside or names(shared.module), shared.size, has_bias=False)


def _before_attention(config: DecoderConfig, module: str) -> Iterator[FusedProjection]:
    latent, hidden_size, q_size = config.latent, config.hidden_size, config.num_heads * config.head_dim
    if latent is None:
        q_size, kv_size = q_size * (2 if config.has_gated_attention else 1), config.num_kv_heads * config.head_dim
        rows = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    else:
        q_size = config.num_heads * latent.query_dim
        query = {"q_proj": q_size} if latent.query_rank is None else {"q_a_proj": latent.query_rank}
        rows = query | {"kv_a_proj_with_mqa": latent.row_size}
    yield FusedProjection(
        field="qkv",
        modules=tuple(f"{module}.{name}" for name in rows),
        rows=tuple(rows.values()),
        in_features=hidden_size,
        has_bias=config.has_qkv_bias,
    )
    if latent is not None and latent.query_rank is not None:
        yield FusedProjection(
            field="query_up", modules=(f"{module}.q_b_proj",), rows=(q_size,), in_features=latent.query_rank
        )


def _around_recurrence(config: RecurrentConfig, module: str, hidden_size: int) -> Iterator[FusedProjection]:
    yield FusedProjection(
        field="qkv",
        modules=tuple(f"{module}.{name}" for name, _rows in config.inputs),
        rows=tuple(rows for _name, rows in config.inputs),
        in_features=hidden_size,
        has_bias=config.has_bias,
    )
    yield FusedProjection(
        field="output",
        modules=(f"{module}.{config.output}",),
        rows=(hidden_size,),
        in_features=config.output_size,
        has_bias=config.has_bias,
    )


def all_projections(config: DecoderConfig) -> Iterator[FusedProjection]:
    """Yield the projections of all layers."""
    for layer_idx in range(config.num_layers):
        yield from layer_projections(config, layer_idx)


def allocate_weights(
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    without: Container[str] = (),
    stacks_experts: bool = False,
) -> DecoderWeights:
    """Return uninitialised weights, to be filled through `checkpoint_views`.

    Projections of the modules `without`, named as in a checkpoint, get no memory: their weights are on the meta device.
    `stacks_experts`: mixtures are `StackedMoe`, whose experts' projections are views of one tensor for all of a layer.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(size: int = config.hidden_size) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    def head_norm(layer_idx: int) -> Tensor | None:
        if config.recurrent_of(layer_idx) is not None:
            return None
        nope = config.nope
        if nope is not None and nope.has_norms_elsewhere and layer_idx not in nope.layers:
            return norm(config.head_dim).fill_(1)
        return norm(config.head_dim) if config.has_qk_norm else None

    def weight(modules: Iterable[str], out_features: int, in_features: int) -> Tensor:
        if any(module in without for module in modules):
            return torch.empty((out_features, in_features), dtype=dtype, device="meta")
        return empty(out_features, in_features)

    def linear(projection: FusedProjection) -> Linear:
        return Linear(
            weight=weight(projection.modules, projection.out_features, projection.in_features),
            bias=empty(projection.out_features) if projection.has_bias else None,
        )

    def layer(layer_idx: int) -> LayerWeights:
        projections, shapes = layer_projections(config, layer_idx), config.recurrent_of(layer_idx)
        return LayerWeights(
            input_norm=norm(),
            q_norm=head_norm(layer_idx),
            k_norm=head_norm(layer_idx),
            sinks=empty(config.num_heads) if config.has_sinks and shapes is None else None,
            post_attention_norm=norm(0) if layer_idx in config.lone_layers else norm(),
            attention_output_norm=norm() if config.has_output_norms else None,
            mlp_output_norm=norm() if config.has_output_norms else None,
            qkv=linear(next(projections)),
            latent=None if config.latent is None else latent(projections, config.latent),
            recurrent=None if shapes is None else recurrent(shapes),
            output=linear(next(projections)),
            mlp=None if layer_idx in config.lone_layers else mlp(projections, config.experts_of(layer_idx)),
        )

    def latent(projections: Iterator[FusedProjection], shapes: LatentConfig) -> LatentWeights:
        rank = shapes.query_rank
        return LatentWeights(
            query_norm=None if rank is None else norm(rank),
            query_up=None if rank is None else linear(next(projections)),
            row_norm=norm(shapes.rank),
            row_up=empty(config.num_heads * (shapes.nope_dim + shapes.value_dim), shapes.rank),
        )

    def recurrent(shapes: RecurrentConfig) -> RecurrentWeights:
        return RecurrentWeights(
            convolution=norm(shapes.num_channels * shapes.kernel_size).view(shapes.num_channels, 1, -1),
            convolution_bias=norm(shapes.num_channels) if shapes.has_convolution_bias else None,
            step_bias=norm(shapes.num_heads),
            log_decay=norm(shapes.num_heads),
            skip=norm(shapes.num_heads) if shapes.has_skip else None,
            norm=norm(shapes.norm_size),
        )

    def mlp(projections: Iterator[FusedProjection], experts: ExpertsConfig | None) -> GatedMlp | Moe:
        if experts is None:
            return gated_mlp(projections)
        router = linear(next(projections))
        score_bias = empty(experts.num_experts).float() if experts.has_score_bias else None
        routed = tuple(islice(projections, 2 * experts.num_experts))
        shared = () if experts.shared is None else (gated_mlp(projections),)
        if not stacks_experts:
            own = tuple(gated_mlp(iter(routed[i : i + 2])) for i in range(0, len(routed), 2))
            return Moe(config=experts, router=router, experts=(*own, *shared), score_bias=score_bias)
        gate_up, down = (stack(each, experts.num_experts) for each in routed[:2])
        own = tuple(GatedMlp(gate_up=gate_up.linear(i), down=down.linear(i)) for i in range(experts.num_experts))
        return StackedMoe(
            config=experts,
            router=router,
            experts=(*own, *shared),
            score_bias=score_bias,
            gate_up=gate_up,
            down=down,
        )

    def stack(projection: FusedProjection, num_experts: int) -> ExpertStack:
        bias = empty(num_experts, projection.out_features) if projection.has_bias else None
        in_features = padded_features(projection.in_features, dtype)
        weight = empty(num_experts, projection.out_features, in_features)
        weight[..., projection.in_features :].zero_()
        return ExpertStack(weight=weight, bias=bias, in_features=projection.in_features)

    def gated_mlp(projections: Iterator[FusedProjection]) -> GatedMlp:
        return GatedMlp(gate_up=linear(next(projections)), down=linear(next(projections)))

    embedding_scale = None
    if config.embedding_scale != 1:
        embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
    embedding = empty(config.vocab_size, config.hidden_size)
    head = embedding
    if not config.has_tied_embeddings:
        head = weight([HEAD_MODULE], config.vocab_size, config.hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(layer_idx) for layer_idx in range(config.num_layers)),
        final_norm=norm(),
        head=Linear(weight=head, bias=None),
        embedding_scale=embedding_scale,
    )


def complete_norms(weights: DecoderWeights, config: DecoderConfig) -> None:
    """Make of norms as a checkpoint has them what multiplies, once they are read. Mutates `weights`.

    They are rounded to the model's dtype, and the one that they may lack is added. In float32 the sum is the one that
    transformers makes for each token; in a dtype of fewer bits it would be rounded.
    """
    inside = "" if config.recurrent is None else f".{config.recurrent.module}.norm.weight"
    for name, view in checkpoint_views(weights, config).items():
        if name.endswith("norm.weight"):
            has_offset = config.has_offset_norms and not (inside and name.endswith(inside))
            view.copy_(view.to(weights.embedding.dtype)).add_(1 if has_offset else 0)


def checkpoint_views(weights: DecoderWeights, config: DecoderConfig) -> dict[str, Tensor]:
    """Return the part of the weights that each tensor name of a Hugging Face checkpoint fills."""
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.has_tied_embeddings:
        views[f"{HEAD_MODULE}.weight"] = plain(weights.head).weight
    for layer_idx, layer in enumerate(weights.layers):
        prefix = f"model.layers.{layer_idx}"
        views[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        if layer.mlp is None:
            pass
        elif layer.attention_output_norm is None or layer.mlp_output_norm is None:
            views[f"{prefix}.post_attention_layernorm.weight"] = layer.post_attention_norm
        else:  # the name means what it says
            views[f"{prefix}.post_attention_layernorm.weight"] = layer.attention_output_norm
            views[f"{prefix}.pre_feedforward_layernorm.weight"] = layer.post_attention_norm
            views[f"{prefix}.post_feedforward_layernorm.weight"] = layer.mlp_output_norm
        if config.has_qk_norm and layer.q_norm is not None and layer.k_norm is not None:
            views[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
            views[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
        if layer.latent is not None:
            views[f"{prefix}.self_attn.kv_a_layernorm.weight"] = layer.latent.row_norm
            views[f"{prefix}.self_attn.kv_b_proj.weight"] = layer.latent.row_up
            if layer.latent.query_norm is not None:
                views[f"{prefix}.self_attn.q_a_layernorm.weight"] = layer.latent.query_norm
        if layer.recurrent is not None and config.recurrent is not None:
            views |= _recurrent_views(layer.recurrent, f"{prefix}.{config.recurrent.module}")
        if isinstance(layer.mlp, Moe) and layer.mlp.score_bias is not None:
            views[f"{prefix}.{layer.mlp.config.module}.gate.e_score_correction_bias"] = layer.mlp.score_bias
        if layer.sinks is not None:
            views[f"{prefix}.self_attn.sinks"] = layer.sinks
        for place, each in zip(layer.places(), layer_projections(config, layer_idx), strict=True):
            linear = plain(place.get())
            for name, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if tensor is not None:
                    parts = zip(each.modules, tensor.split_with_sizes(each.rows), strict=True)
                    views.update((f"{module}.{name}", view) for module, view in parts)
    return views


def _recurrent_views(weights: RecurrentWeights, module: str) -> dict[str, Tensor]:
    views = {
        f"{module}.conv1d.weight": weights.convolution,
        f"{module}.conv1d.bias": weights.convolution_bias,
        f"{module}.dt_bias": weights.step_bias,
        f"{module}.A_log": weights.log_decay,
        f"{module}.D": weights.skip,
        f"{module}.norm.weight": weights.norm,
    }
    return {name: view for name, view in views.items() if view is not None}

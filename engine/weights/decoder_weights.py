"""A decoder's parameters, with projections of the same input fused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.weights.experts import ClampedGate, ExpertsConfig

_TINY = 1e-20  # scores of one expert each may all be 0


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
class GatedMlp:
    """An MLP, or one expert."""

    gate_up: Projection
    """Rows of gate, then up."""
    down: Projection

    def places(self) -> "Iterator[Place]":
        """Yield the places of the projections."""
        yield from (Place(holder=self, field=field) for field in ("gate_up", "down"))

    @property
    def num_bytes(self) -> int:
        """Bytes that a token reads."""
        return self.gate_up.num_bytes + self.down.num_bytes

    def __call__(self, x: Tensor, gate_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the results [num_tokens, hidden_size] of x [num_tokens, hidden_size]."""
        return self.down(gate_mul(self.gate_up(x)))


@dataclass(slots=True, kw_only=True)
class Moe:
    """A mixture of experts (arXiv:1701.06538)."""

    config: ExpertsConfig
    router: Projection
    """Rows of experts, whose products are their logits; then of a shared expert that has a gate."""
    experts: tuple[GatedMlp, ...]
    """Those chosen from, then the shared one."""
    score_bias: Tensor | None
    """float32 [num_experts], with `has_score_bias`."""
    add_up: Callable[[Tensor], Tensor] | None = None
    """Adds up what several ranks have of the sums, float32 [num_tokens, hidden_size]; None: there is one."""

    def places(self) -> "Iterator[Place]":
        """Yield the places of the projections."""
        yield Place(holder=self, field=ROUTER_FIELD)
        for expert in self.experts:
            yield from expert.places()

    @property
    def num_bytes(self) -> int:
        """Bytes that a token reads."""
        read = (*self.experts[: self.config.num_chosen], *self.experts[self.config.num_experts :])
        return self.router.num_bytes + sum(expert.num_bytes for expert in read)

    def __call__(self, x: Tensor, gate_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the weighted sums [num_tokens, hidden_size] of what each row's experts make of it."""
        sums = self.sums(x, gate_mul)
        return (sums if self.add_up is None else self.add_up(sums)).to(x.dtype)

    def sums(self, x: Tensor, gate_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sums in float32, of one of several ranks its part.

        An expert gets all its rows at once, and a row's results are added up in the order of the experts.
        """
        num_experts, shared = self.config.num_experts, self.config.shared
        logits = self.router(x).float()
        weights, chosen = self.choose(logits[:, :num_experts])
        if shared is not None:
            own = weights.new_ones((len(x), 1)) if shared.gate is None else logits[:, num_experts:].sigmoid()
            weights = torch.cat((weights, own), dim=1)
            chosen = F.pad(chosen, (0, 1), value=num_experts)
        multiply = self.activation(gate_mul)
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert_idx in torch.unique(chosen).tolist():
            rows, columns = (chosen == expert_idx).nonzero(as_tuple=True)
            inputs, factors = x[rows], weights[rows, columns, None]
            if self.config.has_weighted_inputs:
                inputs, factors = (inputs * factors).to(x.dtype), torch.ones_like(factors)
            sums[rows] += self.experts[expert_idx](inputs, multiply) * factors
        return sums

    def activation(self, gate_mul: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the experts' own way from products to activations, given that of the model."""
        clamped = self.config.clamped_gate
        return gate_mul if clamped is None else partial(clamped_gate_mul, clamped)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices, [num_tokens, num_chosen], of each row's experts, for float32 logits.

        Shapes depend on no value, so that a CUDA graph can capture it.
        """
        config = self.config
        scores = logits.sigmoid() if config.has_sigmoid_scores else logits.softmax(-1)
        ranks = scores if self.score_bias is None else scores + self.score_bias
        if self.score_bias is None and config.num_groups == 1:
            ranks = logits  # in the order of their scores, several of which may be rounded to 1
        elif config.num_groups > 1:
            grouped = ranks.view(len(ranks), config.num_groups, -1)
            groups = grouped.topk(config.num_group_best).values.sum(-1).topk(config.num_chosen_groups).indices
            is_left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, groups, value=False)
            ranks = grouped.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)
        chosen = ranks.topk(config.num_chosen).indices
        weights = scores.gather(1, chosen)
        if config.has_normalised_weights:
            weights /= weights.sum(-1, keepdim=True) + _TINY
        return weights * config.scale, chosen


def clamped_gate_mul(by: ClampedGate, gate_up: Tensor) -> Tensor:
    """Return the activation [num_tokens, intermediate_size] of gate_up [num_tokens, 2 * intermediate_size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=by.limit), up.clamp(-by.limit, by.limit)
    return (up + 1) * (gate * torch.sigmoid(by.steepness * gate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a projection in a layer."""

    holder: "LayerWeights | LatentWeights | GatedMlp | Moe"
    field: str

    def get(self) -> Projection:
        """Return the projection."""
        projection: Projection = getattr(self.holder, self.field)
        return projection

    def put(self, projection: Projection) -> None:
        """Replace the projection."""
        setattr(self.holder, self.field, projection)


@dataclass(slots=True, kw_only=True)
class LatentWeights:
    """Weights of latent attention between `LayerWeights.qkv` and the pages, and between these and `output`."""

    query_norm: Tensor | None
    query_up: Projection | None
    """Rows of the heads' queries; None, like `query_norm`: `qkv` has them."""
    row_norm: Tensor
    """Norm of a page's row without what is rotated."""
    row_up: Tensor
    """[num_heads * (nope_dim + value_dim), rank]: rows of each head's key, then of its value."""


@dataclass(slots=True, kw_only=True)
class RecurrentWeights:
    """Weights of a recurrent layer between `LayerWeights.qkv` and `output`, all float32."""

    convolution: Tensor
    """[num_channels, 1, kernel_size]; a token's own input is the last one."""
    convolution_bias: Tensor | None
    """[num_channels]."""
    step_bias: Tensor
    """[num_heads]: added to what a token says of its decay."""
    log_decay: Tensor
    """[num_heads]: logarithms of the rates of decay."""
    skip: Tensor | None
    """[num_heads], with `has_skip`."""
    norm: Tensor
    """[norm_size]: norm of the results."""


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One layer. Faster or smaller projections may replace the plain ones after loading.

    What is done with them, and in what order, stands in three places: `engine.model.decoder`, the compiled layer of
    `engine.ops.cpu` (`_packed_layer`, layer.h) and `engine.model.calibration`. All three follow a new field.
    """

    input_norm: Tensor
    qkv: Projection
    """Rows of query, key, value, in this order; with `latent`, of the query (or its source) and of a page's row; with
    `recurrent`, of its inputs."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None = None
    """Logits [num_heads] that join the softmax of their query head and have no value (attention sinks)."""
    output: Projection
    post_attention_norm: Tensor
    """Norm before the MLP; empty where there is none."""
    mlp: GatedMlp | Moe | None
    """None: the next layer follows."""
    latent: LatentWeights | None = None
    recurrent: RecurrentWeights | None = None
    """In place of attention."""
    attention_output_norm: Tensor | None = None
    """Norm of `output`'s results; None: there is none."""
    mlp_output_norm: Tensor | None = None

    def places(self) -> Iterator[Place]:
        """Yield the places of all projections, in the order of `layer_projections`."""
        yield Place(holder=self, field="qkv")
        if self.latent is not None and self.latent.query_up is not None:
            yield Place(holder=self.latent, field="query_up")
        yield Place(holder=self, field="output")
        if self.mlp is not None:
            yield from self.mlp.places()

    @property
    def num_bytes(self) -> int:
        """Bytes of the products that a token reads."""
        num_bytes = self.qkv.num_bytes + self.output.num_bytes
        if self.mlp is not None:
            num_bytes += self.mlp.num_bytes
        if self.latent is not None:
            num_bytes += self.latent.row_up.nbytes
            if self.latent.query_up is not None:
                num_bytes += self.latent.query_up.num_bytes
        return num_bytes


@dataclass(slots=True, kw_only=True)
class DecoderWeights:
    """All layers on one device, all of one dtype but for the norms, which are float32."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Projection
    """[vocab_size, hidden_size]; its weight is the embedding itself when they are tied."""
    embedding_scale: Tensor | None = None
    """Factor of embeddings as the residual stream begins with them, []; None: 1."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens [num_tokens, hidden_size], for int64 token ids [num_tokens]."""
        embedded = F.embedding(token_ids, self.embedding)
        return embedded if self.embedding_scale is None else embedded.mul_(self.embedding_scale)

    def projections(self) -> Iterator[Projection]:
        """Yield the layers' projections, then the head."""
        for layer in self.layers:
            yield from (place.get() for place in layer.places())
        yield self.head

    @property
    def num_bytes(self) -> int:
        """Bytes of the projections that every step reads once; of experts, those of one token."""
        return sum(layer.num_bytes for layer in self.layers) + self.head.num_bytes

    def replace_projections(self, convert: Callable[[Projection], Projection]) -> None:
        """Replace every projection by `convert(projection)`, one by one: two whole copies never exist."""
        self.convert_projections(lambda _field, projection: convert(projection))

    def convert_projections(self, convert: "Convert") -> None:
        """As `replace_projections`, with the projections' fields."""
        for layer in self.layers:
            for place in layer.places():
                place.put(convert(place.field, place.get()))
        self.head = convert(HEAD_FIELD, self.head)


HEAD_FIELD = "head"
ROUTER_FIELD = "router"
Convert = Callable[[str, Projection], Projection]
"""Makes another projection of one, given its field in `LayerWeights` or below, or `HEAD_FIELD`."""


def plain(projection: Projection) -> Linear:
    """Return a projection that was not replaced."""
    assert isinstance(projection, Linear), f"{projection} was replaced"
    return projection

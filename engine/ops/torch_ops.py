"""Portable implementation of the decoder's operations, in plain torch."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops import delta, mamba
from engine.ops.latent_attention import LatentHeads, attend_latent
from engine.ops.metadata import AttentionMetadata
from engine.ops.recurrent import StepStates
from engine.ops.torch_attention import WHOLE_PAGES, PageShare, StepAttention, TorchPagedAttention, TorchStepAttention
from engine.pages.kv_cache import TorchKvStore
from engine.weights.architectures import Activation
from engine.weights.config import DecoderConfig, ScoreFunction
from engine.weights.decoder_weights import LatentWeights, RecurrentWeights
from engine.weights.delta import DeltaConfig
from engine.weights.latent import LATENT_EPS
from engine.weights.mamba import MambaConfig
from engine.weights.rope import RotaryEmbedding, halves, layer_ropes, rotate


class TorchOps:
    """Any device, any dtype; an `Ops`."""

    name = "torch"

    def __init__(
        self,
        config: DecoderConfig,
        store: TorchKvStore,
        dtype: torch.dtype | None = None,
        *,
        share: PageShare = WHOLE_PAGES,
    ) -> None:
        """Take the activations' dtype; None: that of the pages, which hold no codes then."""
        self._config = config
        self._store = store
        self._device = store.layers[0][0].device
        self._dtype = dtype or store.kv_format.dtype
        scores = [ScoreFunction(scale=config.attention_scale)] * config.num_layers
        self._attention = TorchPagedAttention(store, config.windows, scores, dtype=dtype, share=share)
        self._ropes = layer_ropes(config, self._device)

    def plan(self, metadata: AttentionMetadata) -> "TorchStepOps":
        """Prepare masks, groups and rotations; see `Ops`."""
        states = StepStates(metadata, self._store) if self._config.recurrent is not None else None
        return TorchStepOps(self._config, self._attention.plan(metadata), self._rotations(metadata), states)

    def _rotations(self, metadata: AttentionMetadata) -> "list[_Rotation]":
        """Return what each layer makes of queries and keys."""
        positions = torch.from_numpy(metadata.positions).to(self._device)
        made = {rope: _Rotation.of(rope, positions, self._dtype) for rope in set(self._ropes)}
        return [made[rope] for rope in self._ropes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rotation:
    """Rotation of queries and keys at their positions, and growth of queries, in one layer."""

    angles: tuple[Tensor, Tensor]
    """See `RotaryEmbedding.angles`."""
    query_factors: Tensor | None
    """Factor of queries, float32 [num_tokens, 1, 1]; None: 1."""

    @classmethod
    def of(cls, rope: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> "_Rotation":
        factors = rope.query_factors(positions)
        factors = None if factors is None else factors[:, None, None]
        return cls(angles=rope.angles(positions, dtype), query_factors=factors)

    def turn_keys(self, heads: Tensor) -> Tensor:
        """Return heads [num_tokens, num_heads, head_dim]."""
        return rotate(heads, *self.angles)

    def turn_queries(self, heads: Tensor) -> Tensor:
        """Return heads [num_tokens, num_heads, head_dim]."""
        turned = rotate(heads, *self.angles)
        return turned if self.query_factors is None else (turned * self.query_factors).to(heads.dtype)


class TorchStepOps:
    """One planned step; a `StepOps`, a `LatentStepOps` and a `RecurrentStepOps`."""

    def __init__(
        self,
        config: DecoderConfig,
        attention: StepAttention,
        rotations: Seq[_Rotation],
        states: StepStates | None = None,
    ) -> None:
        """`rotations`: those of each layer. `states`: of a model with recurrent layers."""
        self._config = config
        self._states = states
        self._attention = attention
        self._rotations = rotations

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`; over the last dimension."""
        config = self._config
        return _rms_norm(x, weight, config.rms_norm_eps, rounds_first=not config.rounds_norms_last)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`."""
        residual.add_(x)
        return self.rms_norm(residual, weight)

    def attend(
        self,
        layer_idx: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `StepOps`."""
        config = self._config
        gates = None
        if config.has_gated_attention:
            qkv, gates = apart_from_gates(config, qkv)
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            query, key = self.rms_norm(query, q_norm), self.rms_norm(key, k_norm)
        rotation = self._rotations[layer_idx]
        query, key = rotation.turn_queries(query), rotation.turn_keys(key)
        attended = self._attention.attend(layer_idx, query, key, value, sinks)
        return attended.flatten(1) if gates is None else attended.flatten(1) * gates.sigmoid()

    def attend_latent(self, layer_idx: int, compressed: Tensor, weights: LatentWeights) -> Tensor:
        """See `LatentStepOps`."""
        config, latent = self._config, self._config.latent
        assert latent is not None, f"{config} has no latent rows"
        assert isinstance(self._attention, TorchStepAttention), f"{self._attention} reads keys and values"
        query, row = torch.split(compressed, [compressed.shape[1] - latent.row_size, latent.row_size], dim=1)
        if weights.query_up is not None and weights.query_norm is not None:
            query = weights.query_up(_rms_norm(query, weights.query_norm, LATENT_EPS))
        query = query.view(-1, config.num_heads, latent.query_dim)
        nope, rope = torch.split(query, [latent.nope_dim, latent.rope_dim], dim=-1)
        source, key = torch.split(row[:, None], [latent.rank, latent.rope_dim], dim=-1)
        if latent.has_interleaved_pairs:
            rope, key = halves(rope), halves(key)
        rotation = self._rotations[layer_idx]
        query = torch.cat((nope, rotation.turn_queries(rope)), dim=-1)
        row = torch.cat((_rms_norm(source, weights.row_norm, LATENT_EPS), rotation.turn_keys(key)), dim=-1)
        heads = LatentHeads(latent, weights.row_up.view(config.num_heads, -1, latent.rank))
        return attend_latent(self._attention, layer_idx, query, row, heads).flatten(1)

    def recur(self, layer_idx: int, projected: Tensor, weights: RecurrentWeights) -> Tensor:
        """See `RecurrentStepOps`."""
        assert self._states is not None, f"{self._config} has no recurrent layers"
        return recur_in_torch(self._config, layer_idx, projected, weights, self._states)

    def gate_mul(self, gate_up: Tensor) -> Tensor:
        """See `StepOps`."""
        if not self._config.has_gates:
            return activate(gate_up, self._config.activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, self._config.activation) * up


def apart_from_gates(config: DecoderConfig, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads of query, key and value, and the gates [num_tokens, num_heads * head_dim], contiguous.

    qkv [num_tokens, (2 * num_heads + 2 * num_kv_heads) * head_dim] has each query head before its gate.
    """
    gated, others = qkv.tensor_split([2 * config.attended_size], dim=1)
    queries, gates = gated.view(len(qkv), config.num_heads, 2, config.head_dim).unbind(2)
    return torch.cat((queries.flatten(1), others), dim=1), gates.flatten(1)


def recur_in_torch(
    config: DecoderConfig, layer_idx: int, projected: Tensor, weights: RecurrentWeights, states: StepStates
) -> Tensor:
    """Return what `RecurrentStepOps.recur` does, for every kind of recurrent layers."""
    recurrent, eps = config.recurrent, config.rms_norm_eps
    if isinstance(recurrent, MambaConfig):
        return mamba.recur(recurrent, layer_idx, projected, weights, states, eps=eps)
    assert isinstance(recurrent, DeltaConfig), f"{recurrent} has no arithmetic"
    return delta.recur(recurrent, layer_idx, projected, weights, states, eps=eps)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return f(x) of an activation f."""
    match activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU2:
            return F.relu(x).square()


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool = True) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype) if rounds_first else (normed * weight).to(x.dtype)

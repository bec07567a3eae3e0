"""The forward pass: tokens in, hidden states and logits out. Ragged batches are one flat row of tokens."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention import StepAttention
from engine.model.config import DecoderConfig
from engine.model.rope import RotaryEmbedding, rotate
from engine.model.weights import DecoderWeights, LayerWeights


class Decoder:
    """A decoder-only transformer: RMSNorm, rotary attention with shared key heads, gated MLP. Keeps no state."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._rope = RotaryEmbedding(config.rope, head_dim=config.head_dim, device=weights.embedding.device)
        self._qk_norms = [_qk_norm(layer, config) for layer in weights.layers]

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Return final hidden states [num_tokens, hidden_size], normalised; both inputs are int64 [num_tokens].

        Writes the tokens' keys and values through `attention`.
        """
        hidden = F.embedding(token_ids, self._weights.embedding)
        angles = self._rope.angles(positions, hidden.dtype)
        for layer_idx, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            hidden = hidden + self._attend(layer_idx, layer, normed, angles, attention)
            hidden = hidden + _mlp(layer, self._norm(hidden, layer.post_attention_norm))
        return self._norm(hidden, self._weights.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size] for rows of `forward`'s result."""
        return self._weights.head(hidden).float()

    def _attend(
        self,
        layer_idx: int,
        layer: LayerWeights,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: StepAttention,
    ) -> Tensor:
        config = self.config
        num_qk_heads = config.num_heads + config.num_kv_heads
        heads = layer.qkv(normed).view(-1, num_qk_heads + config.num_kv_heads, config.head_dim)
        qk, value = heads[:, :num_qk_heads], heads[:, num_qk_heads:]
        qk_norm = self._qk_norms[layer_idx]
        if qk_norm is not None:
            qk = self._norm(qk, qk_norm)
        qk = rotate(qk, *angles)
        query, key = qk[:, : config.num_heads], qk[:, config.num_heads :]
        return layer.output(attention.attend(layer_idx, query, key, value).flatten(1))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight


def _mlp(layer: LayerWeights, normed: Tensor) -> Tensor:
    gate, up = layer.gate_up(normed).chunk(2, dim=-1)
    return layer.down(F.silu(gate) * up)


def _qk_norm(layer: LayerWeights, config: DecoderConfig) -> Tensor | None:
    """Return the norms' weights for query and key heads side by side, [num_heads + num_kv_heads, head_dim]."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return torch.cat((layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1)))

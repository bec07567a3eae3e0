"""The forward pass: tokens in, hidden states and logits out. A ragged batch is one flat row of tokens."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import functional as F

from engine.model.config import DecoderConfig
from engine.model.quantize import Fp8Linear
from engine.model.weights import DecoderWeights
from engine.ops.interface import Fp8StepOps, StepOps

# Returns a Tensor, or Fp8Rows where every projection that gets them is an Fp8Linear.
_Operation: TypeAlias = Callable[..., Any]


class Decoder:
    """A decoder-only transformer: RMSNorm, rotary attention with shared key heads, gated MLP. Stateless."""

    is_row_independent = False
    """torch and oneDNN choose how to add up a product by its number of rows."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        consumers = [p for layer in weights.layers for p in (layer.qkv, layer.gate_up, layer.down)]
        self._takes_fp8 = all(isinstance(projection, Fp8Linear) for projection in consumers)

    def forward(self, token_ids: Tensor, ops: StepOps) -> Tensor:
        """Return final hidden states [num_tokens, hidden_size], normalised, for int64 token ids [num_tokens].

        Writes the tokens' keys and values to the pages that `ops` was planned for.
        """
        layers = self._weights.layers
        residual = F.embedding(token_ids, self._weights.embedding)
        rms_norm, add_rms_norm, silu_mul = self._operations(ops)
        normed = rms_norm(residual, layers[0].input_norm)
        for layer_idx, layer in enumerate(layers):
            attended = ops.attend(layer_idx, layer.qkv(normed), layer.q_norm, layer.k_norm)
            normed = add_rms_norm(layer.output(attended), residual, layer.post_attention_norm)
            expanded = silu_mul(layer.gate_up(normed))
            reduced = layer.down(expanded)
            if layer_idx + 1 < len(layers):
                normed = add_rms_norm(reduced, residual, layers[layer_idx + 1].input_norm)
        return ops.add_rms_norm(reduced, residual, self._weights.final_norm)

    def _operations(self, ops: StepOps) -> "tuple[_Operation, _Operation, _Operation]":
        """Return norm, norm with residual and gate, whose results the projections take."""
        if self._takes_fp8 and isinstance(ops, Fp8StepOps):
            return ops.rms_norm_fp8, ops.add_rms_norm_fp8, ops.silu_mul_fp8
        return ops.rms_norm, ops.add_rms_norm, ops.silu_mul

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self.config.hidden_size

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size] for rows of `forward`'s result."""
        return self._weights.head(hidden).float()

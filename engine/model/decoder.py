"""The forward pass: tokens in, hidden states and logits out. A ragged batch is one flat row of tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from engine.ops.interface import Fp8StepOps, LatentStepOps, RecurrentStepOps, StepOps
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import DecoderWeights, LayerWeights
from engine.weights.quantize import Fp8Linear

# Returns a Tensor, or Fp8Rows where every projection that gets them is an Fp8Linear.
_Operation: TypeAlias = Callable[..., Any]


class Decoder:
    """A decoder-only transformer: RMSNorm, rotary attention with shared key heads, gated MLP or experts. Stateless."""

    is_row_independent = False
    """torch and oneDNN choose how to add up a product by its number of rows."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        consumers = [place.get() for layer in weights.layers for place in layer.places() if place.field != "output"]
        self._takes_fp8 = all(isinstance(projection, Fp8Linear) for projection in consumers)

    def forward(self, token_ids: Tensor, ops: StepOps) -> Tensor:
        """Return final hidden states [num_tokens, hidden_size], normalised, for int64 token ids [num_tokens].

        Writes the tokens' keys and values to the pages that `ops` was planned for.
        """
        layers, scale = self._weights.layers, self.config.residual_scale
        residual = self._weights.embed(token_ids)
        rms_norm, add_rms_norm, gate_mul = self._operations(ops)
        normed = rms_norm(residual, layers[0].input_norm)
        for layer_idx, layer in enumerate(layers):
            is_last = layer_idx + 1 == len(layers)
            add_next_norm = partial(
                ops.add_rms_norm if is_last else add_rms_norm,
                residual=residual,
                weight=self._weights.final_norm if is_last else layers[layer_idx + 1].input_norm,
            )
            attended = layer.output(_attend(layer_idx, layer, normed, ops))
            if layer.attention_output_norm is not None:
                attended = ops.rms_norm(attended, layer.attention_output_norm)
            if scale != 1:
                attended = attended * scale
            if layer.mlp is None:
                normed = add_next_norm(attended)
                continue
            normed = add_rms_norm(attended, residual, layer.post_attention_norm)
            reduced = layer.mlp(normed, gate_mul)
            if layer.mlp_output_norm is not None:
                reduced = ops.rms_norm(reduced, layer.mlp_output_norm)
            if scale != 1:
                reduced = reduced * scale
            normed = add_next_norm(reduced)
        final: Tensor = normed
        return final

    def _operations(self, ops: StepOps) -> "tuple[_Operation, _Operation, _Operation]":
        """Return norm, norm with residual and gate, whose results the projections take."""
        if self._takes_fp8 and isinstance(ops, Fp8StepOps):
            return ops.rms_norm_fp8, ops.add_rms_norm_fp8, ops.gate_mul_fp8
        return ops.rms_norm, ops.add_rms_norm, ops.gate_mul

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self.config.hidden_size

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size] for rows of `forward`'s result."""
        logits, divisor = self._weights.head(hidden).float(), self.config.logits_divisor
        return logits if divisor == 1 else logits / divisor


def _attend(layer_idx: int, layer: LayerWeights, normed: Any, ops: StepOps) -> Tensor:
    qkv = layer.qkv(normed)
    if layer.recurrent is not None:
        assert isinstance(ops, RecurrentStepOps), f"{ops} are for layers with attention"
        return ops.recur(layer_idx, qkv, layer.recurrent)
    if layer.latent is None:
        return ops.attend(layer_idx, qkv, layer.q_norm, layer.k_norm, layer.sinks)
    assert isinstance(ops, LatentStepOps), f"{ops} are for layers with keys and values"
    return ops.attend_latent(layer_idx, qkv, layer.latent)

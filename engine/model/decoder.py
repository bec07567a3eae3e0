"""The forward pass: tokens in, hidden states and logits out. A ragged batch is one flat row of tokens."""

from torch import Tensor
from torch.nn import functional as F

from engine.model.config import DecoderConfig
from engine.model.weights import DecoderWeights
from engine.ops.interface import StepOps


class Decoder:
    """A decoder-only transformer: RMSNorm, rotary attention with shared key heads, gated MLP. Stateless."""

    is_row_independent = False
    """torch and oneDNN choose how to add up a product by its number of rows."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights

    def forward(self, token_ids: Tensor, ops: StepOps) -> Tensor:
        """Return final hidden states [num_tokens, hidden_size], normalised, for int64 token ids [num_tokens].

        Writes the tokens' keys and values to the pages that `ops` was planned for.
        """
        layers = self._weights.layers
        residual = F.embedding(token_ids, self._weights.embedding)
        normed = ops.rms_norm(residual, layers[0].input_norm)
        next_norms = [*(layer.input_norm for layer in layers[1:]), self._weights.final_norm]
        for layer_idx, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attended = ops.attend(layer_idx, layer.qkv(normed), layer.q_norm, layer.k_norm)
            normed = ops.add_rms_norm(layer.output(attended), residual, layer.post_attention_norm)
            expanded = ops.silu_mul(layer.gate_up(normed))
            normed = ops.add_rms_norm(layer.down(expanded), residual, next_norm)
        return normed

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self.config.hidden_size

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size] for rows of `forward`'s result."""
        return self._weights.head(hidden).float()

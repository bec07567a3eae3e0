"""Draft layers: of EAGLE (Li et al., 2401.15077 and 2406.16858), of EAGLE-3 (2503.01840), and MiMo's MTP (2505.07608).

One decoder layer chooses the token behind token i from the embedding e of token i, and from what the model has computed
at token i - 1, its *state*:

    EAGLE     x = fc [e, state]    the layer has no input norm   state: the final hidden state, normalised
              logits = the model's output head (layer(x))
    EAGLE-3   x = fc state         attention reads               state: the residual stream before three layers
              [norm(e), norm(x)], the residual stream is x
              logits = own output head (norm(layer(x))), of a part of the vocabulary
    MTP       x = fc [norm(state), norm(e)]                      state: the residual stream after the last layer
              logits = the model's output head (norm(layer(x)))

At a token that is drafted itself, the layer's own output stands for the state, in EAGLE-3 for x.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.interface import StepOps
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import Convert, Projection

Logits = Callable[[Tensor], Tensor]
"""Returns float32 logits [rows, vocab] for hidden states [rows, hidden] of the layer's dtype."""


@dataclass(slots=True, kw_only=True)
class EagleWeights:
    """A draft layer. All norms but the one behind attention are those of EAGLE-3 and MTP."""

    embedding: Tensor
    """[vocab, hidden]."""
    fc: Projection
    qkv: Projection
    """Rows of query, key, value, in this order."""
    output: Projection
    post_attention_norm: Tensor
    gate_up: Projection
    """Rows of gate, then up."""
    down: Projection
    input_norm: Tensor | None = None
    """Norm of the embedding."""
    hidden_norm: Tensor | None = None
    """Norm of x; None: the layer is EAGLE's."""
    state_norm: Tensor | None = None
    """Norm of the state; None: the layer is no MTP layer."""
    final_norm: Tensor | None = None
    head: Projection | None = None
    """Output head [tokens that it drafts, hidden]; None: the model's."""
    token_ids: Tensor | None = None
    """Ids of the tokens that the head drafts, int64; None: all, in order."""

    def projections(self) -> dict[str, Projection]:
        """Return the matrices by field."""
        names = ("fc", "qkv", "output", "gate_up", "down", "head")
        return {name: found for name in names if (found := getattr(self, name)) is not None}

    def convert_projections(self, convert: Convert) -> None:
        """Replace every projection by `convert(field, projection)`."""
        for name, projection in self.projections().items():
            setattr(self, name, convert(name, projection))


class EagleLayer:
    """A loaded draft layer. Stateless."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: EagleWeights,
        *,
        vocab_size: int,
        model_logits: Logits,
        tapped_layers: tuple[int, ...] = (),
        has_normed_residual: bool = False,
    ) -> None:
        """`tapped_layers`: layers of the model whose inputs are the state; none: its final hidden state is.

        `has_normed_residual`: the residual stream begins as norm(x), not as x.
        """
        self.config = config
        self.weights = weights
        self.tapped_layers = tapped_layers
        self._vocab_size = vocab_size
        self._model_logits = model_logits
        self._has_normed_residual = has_normed_residual

    def forward(self, token_ids: Tensor, states: Tensor, ops: StepOps) -> Tensor:
        """Return the layer's outputs [num_tokens, hidden] for int64 token ids [num_tokens] and the states before them.

        States are the model's, [num_tokens, size], or outputs of the layer. Writes the tokens' keys and values to the
        pages that `ops` was planned for.
        """
        weights = self.weights
        embedded = F.embedding(token_ids, weights.embedding)
        states = states.to(embedded.dtype)
        if weights.hidden_norm is None:
            residual = inputs = weights.fc(torch.cat((embedded, states), dim=-1))
        else:
            assert weights.input_norm is not None
            embedded = ops.rms_norm(embedded, weights.input_norm)
            if weights.state_norm is not None:
                residual = weights.fc(torch.cat((ops.rms_norm(states, weights.state_norm), embedded), dim=-1))
                inputs = ops.rms_norm(residual, weights.hidden_norm)
            else:
                residual = weights.fc(states) if states.shape[-1] != self.config.hidden_size else states
                normed = ops.rms_norm(residual, weights.hidden_norm)
                inputs = torch.cat((embedded, normed), dim=-1)
                residual = normed if self._has_normed_residual else residual
        attended = ops.attend(0, weights.qkv(inputs), None, None)
        normed = ops.add_rms_norm(weights.output(attended), residual, weights.post_attention_norm)
        return residual + weights.down(ops.gate_mul(weights.gate_up(normed)))

    def logits(self, states: Tensor, ops: StepOps) -> Tensor:
        """Return float32 logits [rows, vocab of the model] for rows of `forward`'s result; -inf where it has none."""
        weights = self.weights
        if weights.final_norm is not None:
            states = ops.rms_norm(states, weights.final_norm)
        if weights.head is None:
            return self._model_logits(states)
        found = weights.head(states).float()
        if weights.token_ids is None:
            return found
        logits = found.new_full((len(found), self._vocab_size), -torch.inf)
        logits[:, weights.token_ids] = found
        return logits

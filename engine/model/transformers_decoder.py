"""Decoders that transformers computes, with our paged cache in its attention registry.

The native architectures (`engine.weights.config`) do not use this. The others run their reference implementation,
module by module, which is slower but needs no port. A batch is one flat row of tokens with explicit positions; in these
models tokens interact only in attention, which is ours.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from engine.ops.metadata import AttentionMetadata
from engine.ops.torch_attention import StepAttention, TorchPagedAttention
from engine.pages.kv_cache import TorchKvStore
from engine.weights.config import TransformersConfig

PAGED_ATTENTION = "kvrelay_paged"
"""Name of our attention in transformers' registry."""


def register_paged_attention() -> None:
    """Register PAGED_ATTENTION with transformers. Idempotent."""
    AttentionInterface.register(PAGED_ATTENTION, _paged_attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersStep:
    """One planned step."""

    position_ids: Tensor
    """Position of each new token in its sequence, int64 [1, num_tokens]."""
    attention: StepAttention


class TransformersOps:
    """Plans the attention of `TransformersDecoder`'s steps. Engine thread only."""

    name = "transformers"

    def __init__(self, config: TransformersConfig, store: TorchKvStore) -> None:
        self._attention = TorchPagedAttention(store, config.windows, config.scores, kv_layers=config.kv_layers)
        self._device = store.layers[0][0].device

    def plan(self, metadata: AttentionMetadata) -> TransformersStep:
        """Prepare positions, masks and groups; valid until the next step is planned."""
        return TransformersStep(
            position_ids=torch.from_numpy(metadata.positions).to(self._device)[None],
            attention=self._attention.plan(metadata),
        )


class TransformersDecoder:
    """A causal language model of transformers, in two halves: hidden states, and logits of selected rows."""

    is_row_independent = False
    """torch chooses how to add up a product by its number of rows."""

    def __init__(self, config: TransformersConfig, causal_lm: Any) -> None:
        """`causal_lm` was loaded with PAGED_ATTENTION."""
        self.config = config
        self._body = causal_lm.base_model
        self._head = _without_body(causal_lm)
        head = causal_lm.get_output_embeddings()
        self.hidden_size: int = 0 if head is None else head.weight.shape[-1]
        """Length of a hidden state, which may differ from config.json's; 0 when it is not known."""

    def forward(self, token_ids: Tensor, step: TransformersStep) -> Tensor:
        """Return final hidden states [num_tokens, hidden_size] for int64 token ids [num_tokens].

        Writes the tokens' keys and values to the pages that `step` was planned for. The step is an argument, so that
        engines of one process are independent.
        """
        output = self._body(
            input_ids=token_ids[None],
            position_ids=step.position_ids,
            use_cache=False,
            return_dict=True,
            kvrelay_step=step,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size] for rows of `forward`'s result."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits
        return logits[0].float()


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    kvrelay_step: TransformersStep,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend over our pages; an attention function of transformers.

    query, key, value [1, heads, num_tokens, head_dim], rotated; the result is [1, num_tokens, num_heads, head_dim].
    The trial run has checked the options, and that there is no mask: transformers makes none for an attention function
    without a registered mask function.
    """
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    attended = kvrelay_step.attention.attend(module.layer_idx, query, key, value)
    return attended[None], None


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """Output of a decoder, with all fields that a causal language model reads."""

    cross_attentions: None = None
    shared_kv_states: None = None


class _KnownHidden(nn.Module):
    """Replacement of a causal language model's decoder that returns known hidden states."""

    def forward(self, *_inputs: None, inputs_embeds: Tensor, **_options: Any) -> Any:
        """Return `inputs_embeds` as the last hidden state."""
        return _DecoderOutput(last_hidden_state=inputs_embeds)


def _without_body(causal_lm: Any) -> Any:
    """Return the same model with `_KnownHidden` as its decoder; parameters are shared.

    So a model's own code computes the part after its decoder (softcaps, scales, biases) for any number of rows.
    """
    head = copy.copy(causal_lm)
    head._modules = {**causal_lm._modules, causal_lm.base_model_prefix: _KnownHidden()}  # noqa: SLF001 - nn.Module's
    return head

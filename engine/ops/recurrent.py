"""States of recurrent layers in a step, in torch, and what all kinds of recurrence do with them.

Nothing here, nor in the kinds' own modules, adds up in an order that depends on how a text is cut into steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.metadata import AttentionMetadata
from engine.pages.kv_cache import TorchKvStore
from engine.weights.decoder_weights import RecurrentWeights


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's new tokens, for code that goes through sequences one by one."""

    seq_idx: int
    tokens: slice


class StepStates:
    """The states of a step's sequences. Engine thread only."""

    def __init__(self, metadata: AttentionMetadata, store: TorchKvStore) -> None:
        self._store = store
        pages = metadata.state_pages(store.window_page_of)
        self.sources, self.targets = torch.from_numpy(pages.sources), torch.from_numpy(pages.targets)
        """Pages, int64 [num_seqs]; see `StatePages`."""
        self.starts = torch.from_numpy(metadata.query_start_loc)
        """Bounds of the sequences' tokens, int64 [num_seqs + 1]."""
        self.is_decode = len(metadata.positions) == len(metadata.spans)
        """Whether every sequence has one new token."""

    @property
    def spans(self) -> Iterator[Span]:
        """The sequences' tokens."""
        return (Span(i, slice(begin, end)) for i, (begin, end) in enumerate(pairwise(self.starts.tolist())))

    def pages(self, layer_idx: int) -> Tensor:
        """Return the pages of a layer's states, float32 [num_pages, state_size]."""
        return self._store.layers[layer_idx][0]

    def read(self, layer_idx: int) -> Tensor:
        """Return a copy of the sequences' states before the step, float32 [num_seqs, state_size]."""
        states = self.pages(layer_idx).index_select(0, self.sources.clamp(min=0))
        return states.masked_fill_((self.sources < 0)[:, None], 0.0)

    def write(self, layer_idx: int, states: Tensor) -> None:
        """Leave the states behind the step, float32 [num_seqs, state_size]."""
        self.pages(layer_idx).index_copy_(0, self.targets, states)


def convolve(inputs: Tensor, states: Tensor, step: StepStates, weights: RecurrentWeights) -> Tensor:
    """Return the causal convolution of a step's inputs, then SiLU, float32 [num_tokens, num_channels].

    inputs are float32 [num_tokens, num_channels]. Mutates the first values of `states` [num_seqs, state_size], which
    become the convolution's last inputs.
    """
    num_channels, _, kernel_size = weights.convolution.shape
    last = states[:, : (kernel_size - 1) * num_channels].view(len(states), -1, num_channels)
    if step.is_decode:
        rows = torch.cat((last, inputs[:, None]), dim=1)
        last.copy_(rows[:, 1:])
        return _slide(rows, weights)[:, 0]
    outputs = torch.empty_like(inputs)
    for span in step.spans:
        rows = torch.cat((last[span.seq_idx], inputs[span.tokens]))
        outputs[span.tokens] = _slide(rows[None], weights)[0]
        last[span.seq_idx] = rows[len(rows) - kernel_size + 1 :]
    return outputs


def _slide(rows: Tensor, weights: RecurrentWeights) -> Tensor:
    """Return SiLU of the convolution of rows [n, kernel_size - 1 + num_tokens, num_channels]."""
    kernel_size = weights.convolution.shape[2]
    num_tokens = rows.shape[1] - kernel_size + 1
    sums = rows.new_zeros((len(rows), num_tokens, rows.shape[2]))
    if weights.convolution_bias is not None:
        sums += weights.convolution_bias
    for i in range(kernel_size):
        sums += rows[:, i : i + num_tokens] * weights.convolution[:, 0, i].contiguous()
    return F.silu(sums)

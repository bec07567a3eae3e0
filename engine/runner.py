"""Computes the engine's steps with torch: flattens a batch, runs the decoder, asks the sampler."""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine.device.devices import errors_of_device
from engine.executor import DoneStep, Hidden, Logprobs, ScheduledSequence, StepResult, Walk
from engine.kv_store import KvStore
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.options import CheckpointInfo
from engine.pages.kv_cache import TorchKvStore
from engine.sampling.draw import DrawKernel
from engine.sampling.logits import position_logprobs
from engine.sampling.sampler import Sampler, sampling_rows
from engine.work import StepFloors

StepT = TypeVar("StepT")
StepT_co = TypeVar("StepT_co", covariant=True)
StepT_contra = TypeVar("StepT_contra", contravariant=True)

# Prompt log-probabilities need float32 logits of every position; they are computed for this many rows at a time.
_LOGPROB_ROWS = 64


class Model(Protocol[StepT_contra]):
    """A decoder with its own form of a step's attention."""

    def forward(self, token_ids: Tensor, step: StepT_contra, /) -> Tensor:
        """Return final hidden states [num_tokens, hidden_size] for int64 token ids [num_tokens]; writes their KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size] for rows of `forward`'s result."""
        ...

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state; 0 when it is not known."""
        ...

    @property
    def is_row_independent(self) -> bool:
        """Whether a row's results are the same bits whatever other rows are computed with it."""
        ...


@runtime_checkable
class TappedModel(Protocol[StepT_contra]):
    """A `Model` that also shows the states between its layers."""

    def forward_tapped(self, token_ids: Tensor, step: StepT_contra, layers: Seq[int], /) -> tuple[Tensor, list[Tensor]]:
        """Return `Model.forward`'s result, and the residual stream [num_tokens, hidden_size] before some layers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """The states that results have, for drafts."""

    num_tokens: int
    """Most tokens of a sequence and step; the latest ones."""
    layers: tuple[int, ...] = ()
    """Layers before which the residual stream is taken, side by side; none: the final hidden state, normalised. Needs a
    `TappedModel`."""


class StepPreparer(Protocol[StepT_co]):
    """Prepares a model's steps."""

    def plan(self, metadata: AttentionMetadata) -> StepT_co:
        """Prepare a step; valid until the next one is planned."""
        ...


class ModelExecutor(Generic[StepT]):
    """Executor of a real model. Engine thread only."""

    max_steps_in_flight = 1

    def __init__(
        self,
        model: Model[StepT],
        store: TorchKvStore,
        ops: StepPreparer[StepT],
        info: CheckpointInfo,
        floors: StepFloors | None = None,
        draw_kernel: DrawKernel | None = None,
    ) -> None:
        self.kv: KvStore = store
        self.max_model_len = info.max_model_len
        self.vocab_size = info.vocab_size
        self.hidden_size = model.hidden_size
        self.eos_token_ids = info.eos_token_ids
        self.model_name = info.name
        # No state remembers what it was before a token that is rejected.
        self.verifies_drafts = model.is_row_independent and not store.shape.state_layers
        # Pages of codes round what is read again in one chunk otherwise than what was decoded.
        self.exact_resume = info.is_float32 or (model.is_row_independent and not store.kv_format.has_codes)
        self.floors = floors
        self.kept_states: KeptStates | None = None
        """Content of `StepResult.states`; None: nothing."""
        self._hidden_dtype = torch.float32
        self.model = model
        self._store = store
        self._ops = ops
        self._sampler = Sampler(vocab_size=self.vocab_size, eos_token_ids=info.eos_token_ids, draw_kernel=draw_kernel)
        self._device = store.layers[0][0].device
        self.compiles_steps = self._device.type != "cpu"

    @errors_of_device()
    @torch.inference_mode()
    def launch(self, batch: Seq[ScheduledSequence]) -> DoneStep:
        """Run one step before returning: write KV of all new tokens, sample where asked."""
        if not batch:
            return DoneStep([])
        spans = [span for item in batch for span in _spans(item)]
        metadata = AttentionMetadata.from_spans(spans, block_size=self._store.shape.block_size)
        token_ids = array("I")
        for item in batch:
            token_ids += item.token_ids
        hidden, states = self._forward(
            torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(self._device), self._ops.plan(metadata)
        )
        self._hidden_dtype = hidden.dtype
        starts = [0, *accumulate(item.num_rows for item in batch)]
        results = [
            StepResult(
                sampled=[],
                prompt_logprobs=self._prompt_logprobs(item, hidden[begin:end]),
                pooled=pooled_sum(hidden[begin:end], item.first_pooled),
            )
            for item, begin, end in zip(batch, starts[:-1], starts[1:], strict=True)
        ]
        walks = self._sample(batch, hidden, starts, results)
        if self.kept_states is not None:
            for i, walk in walks.items():
                rows = _kept_rows(batch[i], starts[i], walk, self.kept_states.num_tokens)
                results[i].states = torch.cat([each[rows] for each in states], dim=-1).float().cpu().numpy()
        return DoneStep(results)

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] of the model's output head for float32 hidden states [rows, hidden]."""
        return self.model.logits(hidden.to(self._device, self._hidden_dtype))

    def _forward(self, token_ids: Tensor, step: StepT) -> tuple[Tensor, list[Tensor]]:
        """Return final hidden states, and those that are kept for drafts."""
        if self.kept_states is None or not self.kept_states.layers:
            hidden = self.model.forward(token_ids, step)
            return hidden, [hidden]
        assert isinstance(self.model, TappedModel), f"{self.model_name} does not show the states between its layers"
        return self.model.forward_tapped(token_ids, step, self.kept_states.layers)

    def _sample(
        self, batch: Seq[ScheduledSequence], hidden: Tensor, starts: list[int], results: list[StepResult]
    ) -> dict[int, Walk]:
        """Choose the due tokens from the hidden states before them and add them to the results.

        Returns which of the sampled tokens count, by place in the batch; without prompts of several samples.
        """
        due = [i for i, item in enumerate(batch) if item.num_samples]
        walks: dict[int, Walk] = {}
        if not due:
            return walks
        last_rows = [row for i in due for row in range(starts[i + 1] - 1 - batch[i].num_drafted, starts[i + 1])]
        logits = self.model.logits(hidden.index_select(0, torch.tensor(last_rows, device=self._device)))
        if any(batch[i].num_samples > 1 for i in due):  # of a prompt, which has no draft
            repeats = [count for i in due for count in (batch[i].num_samples, *(1,) * batch[i].num_drafted)]
            logits = logits.repeat_interleave(torch.tensor(repeats, device=self._device), dim=0)
        rows = [row for i in due for row in sampling_rows(batch[i])]
        sampled = iter(self._sampler.choose(logits, rows).materialize())
        for i in due:
            item, result = batch[i], results[i]
            winners = list(islice(sampled, item.num_sampled))
            walk = item.walk(winners)
            if item.num_samples == 1:
                walks[i] = walk
            result.sampled.extend(winners[place] for place in walk.places)
            result.branch = walk.branch
        return walks

    def _prompt_logprobs(self, item: ScheduledSequence, hidden: Tensor) -> list[Logprobs]:
        """Return the log-probabilities of the next prompt token at each prompt position, from the hidden states."""
        sequence = item.sequence
        num_top = sequence.request.sampling.num_prompt_logprobs
        if num_top is None:
            return []
        targets = sequence.token_ids[sequence.num_computed + 1 : sequence.num_prompt_tokens][: item.num_new_tokens]
        return prompt_logprobs(self.model.logits, hidden, targets, num_top)


def _kept_rows(item: ScheduledSequence, start: int, walk: Walk, most: int) -> list[int]:
    """Return the rows of a step that hold a sequence's latest tokens, at most so many, without rejected ones.

    `start` is the sequence's first row.
    """
    last_known = start + item.num_new_tokens - len(item.draft) - 1
    accepted = [last_known + place for place in walk.places[1:]]
    first = max(start, last_known + 1 - max(0, most - len(accepted)))
    return [*range(first, last_known + 1), *accepted][-most:]


def _spans(item: ScheduledSequence) -> list[SequenceSpan]:
    """Return the spans of a sequence's new tokens: one, or one for each token where a draft is verified."""
    span = SequenceSpan.of(item)
    if not item.draft:
        return [span]
    rows = span.split([(branch.depth, branch.block_table) for branch in item.branches])
    for branch in item.branches:
        first = span.num_computed + 1 + branch.depth
        rows += SequenceSpan(
            num_computed=first, num_new_tokens=len(branch.token_ids), block_table=branch.block_table
        ).split()
    return rows


def prompt_logprobs(
    logits_of: Callable[[Tensor], Tensor | None], hidden: Tensor, targets: Seq[int], num_top: int
) -> list[Logprobs]:
    """Return the log-probabilities of `targets`, each from the hidden state at its place.

    Empty where `logits_of` returns None, on a rank of several that does not get the logits.
    """
    found: list[Logprobs] = []
    for begin in range(0, len(targets), _LOGPROB_ROWS):
        chunk = targets[begin : begin + _LOGPROB_ROWS]
        logits = logits_of(hidden[begin : begin + len(chunk)])
        if logits is not None:
            found.extend(position_logprobs(logits, chunk, num_top))
    return found


def pooled_sum(hidden: Tensor, first: int | None) -> Hidden | None:
    """Return the sum of a sequence's new hidden states from `ScheduledSequence.first_pooled` on; None without any."""
    if first is None:
        return None
    summed: Hidden = hidden[first:].sum(dim=0, dtype=torch.float32).cpu().numpy()
    return summed

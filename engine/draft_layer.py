"""Runs a draft layer on pages of its own: an `Executor` of one layer, whose inputs are also states of the model."""

from array import array
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.executor import DoneStep, Executor, ScheduledSequence, StepResult
from engine.kv_store import KvStore
from engine.model.eagle import EagleLayer
from engine.ops.interface import Ops
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.sampling.sampler import Sampler, sampling_rows
from engine.speculation.eagle import LayerShadow


class LayerExecutor:
    """Computes steps of `LayerShadow`s. Engine thread only.

    Results have the layer's output at the last token (`StepResult.states`), which stands for the state at it.
    """

    def __init__(self, layer: EagleLayer, store: KvStore, ops: Ops, model: Executor) -> None:
        """`model`: the one that it drafts for."""
        self.kv = store
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.model_name = f"draft layer of {model.model_name}"
        self._layer = layer
        self._ops = ops
        self._sampler = Sampler(vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)

    @torch.inference_mode()
    def launch(self, batch: Seq[ScheduledSequence]) -> DoneStep:
        """Run a step before returning: write KV of all new tokens, sample where asked."""
        token_ids, spans, states = array("I"), [], []
        for item in batch:
            shadow = item.sequence
            assert isinstance(shadow, LayerShadow)
            token_ids += item.token_ids
            states.append(shadow.states(shadow.num_computed, item.num_new_tokens))
            # Only differences of positions matter to rotary embedding.
            spans.append(
                SequenceSpan(
                    num_computed=shadow.num_computed - shadow.first,
                    num_new_tokens=item.num_new_tokens,
                    block_table=shadow.block_table,
                )
            )
        ops = self._ops.plan(AttentionMetadata.from_spans(spans, block_size=self.kv.shape.block_size))
        ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64))
        outputs = self._layer.forward(ids, torch.from_numpy(np.concatenate(states)), ops)
        results = [StepResult(sampled=[], prompt_logprobs=[]) for _ in batch]
        due = [i for i, item in enumerate(batch) if item.num_samples]
        if due:
            ends = np.cumsum([item.num_new_tokens for item in batch])
            last: Tensor = outputs[[int(ends[i]) - 1 for i in due]]
            rows = [row for i in due for row in sampling_rows(batch[i])]
            sampled = self._sampler.sample(self._layer.logits(last, ops), rows)
            for i, each, state in zip(due, sampled, last.float().numpy(), strict=True):
                results[i].sampled.append(each)
                results[i].states = state[None]
        return DoneStep(results)

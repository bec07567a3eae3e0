"""Computes the engine's steps with torch: flattens a batch, runs the decoder, asks the sampler."""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from engine.executor import KvShape, KvStore, Logprobs, ScheduledSequence, StepResult
from engine.kv_cache import TorchKvStore, num_blocks_for_budget
from engine.model.config import DecoderConfig, parse_config, read_json
from engine.model.decoder import Decoder
from engine.model.fingerprint import kv_fingerprint
from engine.model.loader import load_weights, weight_files
from engine.model.precision import dtype_name, resolve_device, resolve_dtype
from engine.ops.interface import Ops
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.sampler import Sampler, SamplingRow, position_logprobs

logger = logging.getLogger(__name__)

# Prompt log-probabilities need float32 logits of every position; so many rows at a time bound that memory.
_LOGPROB_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a checkpoint says beside its decoder."""

    name: str
    max_model_len: int
    eos_token_ids: frozenset[int]


class ModelExecutor:
    """Executor of a real model. Engine thread only."""

    def __init__(self, model: Decoder, store: TorchKvStore, ops: Ops, info: ModelInfo) -> None:
        self.kv: KvStore = store
        self.max_model_len = info.max_model_len
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = info.eos_token_ids
        self.model_name = info.name
        self._model = model
        self._store = store
        self._ops = ops
        self._sampler = Sampler(vocab_size=self.vocab_size, eos_token_ids=info.eos_token_ids)
        self._device = store.layers[0][0].device

    @torch.inference_mode()
    def execute(self, batch: Seq[ScheduledSequence]) -> list[StepResult]:
        """Run one step: write KV of all new tokens, sample where asked. Does not mutate the sequences."""
        if not batch:
            return []
        spans = [_span(item) for item in batch]
        block_size = self._store.shape.block_size
        self._clear_entered_blocks(spans)
        metadata = AttentionMetadata.from_spans(spans, block_size=block_size)
        token_ids = [
            token_id
            for item, span in zip(batch, spans, strict=True)
            for token_id in item.sequence.token_ids[span.num_computed : span.context_len]
        ]
        hidden = self._model.forward(
            torch.tensor(token_ids, dtype=torch.int64, device=self._device),
            self._ops.plan(metadata),
        )
        starts = metadata.query_start_loc.tolist()
        results = [
            StepResult(sampled=[], prompt_logprobs=self._prompt_logprobs(item, hidden[begin:end]))
            for item, begin, end in zip(batch, starts[:-1], starts[1:], strict=True)
        ]
        self._sample(batch, hidden, starts, results)
        return results

    def _sample(
        self, batch: Seq[ScheduledSequence], hidden: Tensor, starts: list[int], results: list[StepResult]
    ) -> None:
        """Choose the tokens that are due, from each sequence's last hidden state, and add them to the results."""
        due = [i for i, item in enumerate(batch) if item.num_samples]
        if not due:
            return
        last_rows = torch.tensor([starts[i + 1] - 1 for i in due], device=self._device)
        logits = self._model.logits(hidden.index_select(0, last_rows))
        if any(batch[i].num_samples > 1 for i in due):
            repeats = torch.tensor([batch[i].num_samples for i in due], device=self._device)
            logits = logits.repeat_interleave(repeats, dim=0)
        rows = [_sampling_row(batch[i], j) for i in due for j in range(batch[i].num_samples)]
        sampled = iter(self._sampler.sample(logits, rows))
        for i in due:
            results[i].sampled.extend(next(sampled) for _ in range(batch[i].num_samples))

    def _prompt_logprobs(self, item: ScheduledSequence, hidden: Tensor) -> list[Logprobs]:
        """Return what the step's prompt positions say of the prompt tokens behind them; hidden is of this sequence."""
        sequence = item.sequence
        num_top = sequence.request.sampling.num_prompt_logprobs
        if num_top is None:
            return []
        targets = sequence.token_ids[sequence.num_computed + 1 : sequence.num_prompt_tokens][: item.num_new_tokens]
        found: list[Logprobs] = []
        for begin in range(0, len(targets), _LOGPROB_ROWS):
            chunk = targets[begin : begin + _LOGPROB_ROWS]
            found.extend(position_logprobs(self._model.logits(hidden[begin : begin + len(chunk)]), chunk, num_top))
        return found

    def _clear_entered_blocks(self, spans: Seq[SequenceSpan]) -> None:
        """Zero the pages that a sequence enters in this step and leaves partly empty.

        Attention gathers whole pages and masks what is beyond a sequence's end, but a NaN that another request left
        there would survive the mask: 0 * NaN is NaN.
        """
        block_size = self._store.shape.block_size
        entered = []
        for span in spans:
            last_idx, num_filled = divmod(span.context_len, block_size)
            if num_filled and last_idx * block_size >= span.num_computed:
                entered.append(span.block_table[last_idx])
        if entered:
            self._store.clear_blocks(entered)


def load_executor(  # noqa: PLR0913 - the places where serving.yaml's values end up
    *,
    model_dir: Path,
    model_name: str,
    dtype: str,
    device: str,
    block_size: int,
    num_blocks: int | None,
    kv_memory_bytes: int | None,
    max_model_len: int | None,
) -> ModelExecutor:
    """Return an executor for a checkpoint folder; takes seconds, and logs what it chose.

    `dtype` and `device` may be "auto". Pages are `num_blocks`, or what fits in `kv_memory_bytes` when that is None.
    `max_model_len` can only shorten what the checkpoint allows. Raises UnsupportedModel; ValueError when no page fits.
    """
    started_s = time.monotonic()
    raw = read_json(model_dir / "config.json")
    config = parse_config(raw)
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, raw)
    files = weight_files(model_dir)
    shape = KvShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype_name(torch_dtype),
        bytes_per_element=torch_dtype.itemsize,
        fingerprint=kv_fingerprint(config, files, dtype=dtype_name(torch_dtype), block_size=block_size),
    )
    if num_blocks is None:
        if kv_memory_bytes is None:
            raise ValueError("either num_blocks or kv_memory_bytes is needed")
        num_blocks = num_blocks_for_budget(kv_memory_bytes, shape)
    if torch_device.type == "cpu":
        _check_memory(num_blocks * shape.block_bytes)
    info = ModelInfo(
        name=model_name,
        max_model_len=min(config.max_position_embeddings, max_model_len or config.max_position_embeddings),
        eos_token_ids=_eos_token_ids(model_dir, raw),
    )
    weights = load_weights(files, config, dtype=torch_dtype, device=torch_device)
    linears = "oneDNN, packed weights" if weights.pack() else "torch"
    model = Decoder(config, weights)
    store = TorchKvStore(shape, num_blocks, device=torch_device)
    _log_loaded(info, config, store, linears, time.monotonic() - started_s)
    return ModelExecutor(model, store, TorchOps(config, store), info)


def _check_memory(kv_bytes: int) -> None:
    """Raise ValueError when the pages do not fit: the system would grant them all the same, and kill us later."""
    available = psutil.virtual_memory().available
    if kv_bytes > available:
        gib = 1 << 30
        raise ValueError(
            f"{kv_bytes / gib:.1f} GiB of KV pages do not fit into the {available / gib:.1f} GiB of memory that are"
            " available: lower kv_memory_gib or num_blocks"
        )


def _span(item: ScheduledSequence) -> SequenceSpan:
    sequence = item.sequence
    return SequenceSpan(
        num_computed=sequence.num_computed, num_new_tokens=item.num_new_tokens, block_table=sequence.block_table
    )


def _sampling_row(item: ScheduledSequence, sample: int) -> SamplingRow:
    sequence = item.sequence
    return SamplingRow(
        params=sequence.request.sampling,
        sample_index=sequence.sample_index + sample,
        token_index=sequence.num_output_tokens,
        prompt_token_ids=sequence.request.prompt_token_ids,
        output_token_ids=sequence.output_token_ids if sequence.request.sampling.has_penalties else (),
    )


def _eos_token_ids(model_dir: Path, raw_config: dict[str, Any]) -> frozenset[int]:
    """Return the tokens that end an answer: generation_config.json's, else config.json's."""
    path = model_dir / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = raw_config.get("eos_token_id")
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _log_loaded(info: ModelInfo, config: DecoderConfig, store: TorchKvStore, linears: str, load_s: float) -> None:
    shape = store.shape
    logger.info(
        "model loaded",
        extra={
            "model": info.name,
            "device": str(store.layers[0][0].device),
            "dtype": shape.dtype,
            "num_layers": config.num_layers,
            "max_model_len": info.max_model_len,
            "kv_bytes_per_token": shape.bytes_per_token,
            "kv_bytes": store.num_blocks * shape.block_bytes,
            "num_blocks": store.num_blocks,
            "block_size": shape.block_size,
            "num_kv_tokens": store.num_blocks * shape.block_size,
            "linears": linears,
            "torch_threads": torch.get_num_threads(),
            "load_s": round(load_s, 3),
        },
    )

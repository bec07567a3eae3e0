"""Launches steps on a device and never waits for it: step n + 1 is planned and launched while step n computes.

    host     plan 1 ─ launch 1 ─ plan 2 ─ launch 2 ─ results 1 ─ plan 3 ─ launch 3 ─ results 2 …
    device             └─ copy in · forward 1 · choose 1 · copy out ┴─ copy in · forward 2 · choose 2 · copy out ┴─ …

A step goes to the device as one packed copy; its tokens and its log-probabilities come back as one copy each. A token
that the host does not know yet (`ScheduledSequence.input_row`) is read where the previous step left it. Steps are
launched on one stream, so that no event is needed between them; `StepHandle.results` waits for its own step's copies.

Where a grammar has to read such a token first, a step is launched in two parts, and the second waits for the results of
the step before:

    host     launch 2 ─ results 1 ─ choose 2 ─ plan 3 ─ launch 3 ─ results 2 ─ choose 3 …
    device   ┴─ copy in · forward 2 ─┴─ masks in · choose 2 · copy out ┴─ copy in · forward 3 …

Pages are not cleared when they get a new owner: the kernels do not read beyond a sequence's end. (`TorchOps` does, and
clears them itself.)
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.cuda.buffers import BlockTables, DecodeColumns, RaggedColumns, SentStep, TableUpdate
from engine.cuda.graphs import DecodeGraphs, DeviceOps, decode_sizes
from engine.cuda.launched_step import LaunchedStep, PooledFetch, Raced, SamplesPlan, chooses_late
from engine.device.columns import Column, PackedColumns
from engine.device.devices import device_for, errors_of_device
from engine.executor import DeviceBroken, DoneStep, ScheduledSequence, StepHandle
from engine.kv_store import KvStore
from engine.model.decoder import Decoder
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.options import CheckpointInfo
from engine.pages.kv_cache import TorchKvStore
from engine.sampling.device_draw import draw_on_device
from engine.sampling.logits import LogprobsFetch, fetch_logprobs
from engine.sampling.plan import Chosen, SamplingPlan
from engine.sampling.sampler import Sampler, sampling_rows
from engine.work import StepFloors

# Prompt log-probabilities need float32 logits of every position; they are computed for this many rows at a time.
_LOGPROB_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of a single step, for which buffers are allocated."""

    max_seqs: int
    """Maximum number of sequences, and of samples."""
    max_graph_seqs: int
    """Number of sequences above which decode steps run kernel by kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptLogprobs:
    """Prompt positions of one sequence whose next tokens get log-probabilities."""

    item_idx: int
    first_token: int
    """Index of the first position among the step's tokens."""
    targets: Column
    """Next tokens, int64 [num_rows]."""
    num_rows: int
    num_top: int


class CudaExecutor:
    """Executor of a model on a device whose kernels read steps from its memory. Engine thread only."""

    max_steps_in_flight = 2
    verifies_drafts = False
    compiles_steps = True

    def __init__(
        self,
        model: Decoder,
        store: TorchKvStore,
        ops: DeviceOps,
        info: CheckpointInfo,
        limits: StepLimits,
        floors: StepFloors | None = None,
    ) -> None:
        self.kv: KvStore = store
        self.max_model_len = info.max_model_len
        self.vocab_size = model.config.vocab_size
        self.hidden_size = model.hidden_size
        self.eos_token_ids = info.eos_token_ids
        self.model_name = info.name
        self.exact_resume = info.is_float32  # a product's kernel, and so its order, depends on the number of rows
        self.floors = floors
        self.announce: Callable[[SentStep], None] | None = None
        """Called before each launch, of the first of several ranks; None: there is one."""
        self._model = model
        self._ops = ops
        self._block_size = store.shape.block_size
        self._device = store.layers[0][0].device
        self._tables = BlockTables(
            num_rows=limits.max_seqs, max_blocks=-(-info.max_model_len // self._block_size), device=self._device
        )
        self._decode = DecodeGraphs(
            model,
            ops,
            self._tables.tables,
            sizes=tuple(decode_sizes(min(limits.max_seqs, limits.max_graph_seqs))),
            block_size=self._block_size,
        )
        self._sampler = Sampler(
            vocab_size=self.vocab_size, eos_token_ids=info.eos_token_ids, draw_kernel=draw_on_device
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs; takes seconds."""
        self._decode.capture()

    @errors_of_device()
    @torch.inference_mode()
    def launch(self, batch: Seq[ScheduledSequence]) -> StepHandle:
        """Launch one step and return at once; see `Executor`."""
        if not batch:
            return DoneStep([])
        size = self._decode.size_for(len(batch)) if all(map(_is_decode, batch)) else None
        with self._ending_with_errors():
            return self._launch_ragged(batch) if size is None else self._launch_decode(batch, size)

    @contextmanager
    def _ending_with_errors(self) -> Iterator[None]:
        """Launch work of which nothing runs any more when it raises. Raises DeviceBroken."""
        try:
            yield
        except BaseException as error:
            if self.announce is not None:  # what others have launched waits for this rank
                raise DeviceBroken(f"cannot go on: a step has failed in one of several ranks: {error}") from error
            try:
                device_for(self._device).synchronize()  # some of it may be running
            except RuntimeError as broken:  # Triton and cuBLAS report CUDA's errors as their own, this call as they are
                raise DeviceBroken(f"cannot use the device any more: {broken}") from broken
            raise

    def _launch_decode(self, batch: Seq[ScheduledSequence], size: int) -> StepHandle:
        """Launch a step that a graph may compute: one token and one sample of every sequence."""
        sequences = [item.sequence for item in batch]
        rows = self._tables.assign(sequences)
        columns = PackedColumns()
        samples = [row for item in batch for row in sampling_rows(item)]
        step = self._decode.add(batch, rows, size, columns, samples=samples)
        update = self._tables.plan(sequences, rows, columns)
        sampling = None if chooses_late(batch) else self._sampler.plan_rest(samples, columns)
        self._send(step, columns, update)
        words = self._decode.upload(step, columns)
        self._tables.apply(update, words)
        output = self._decode.run(step)
        raced = Raced(logits=output.logits[: len(batch)], token_ids=output.token_ids[: len(batch)])
        return self._launched(batch, words, raced, sampling)

    def _launch_ragged(self, batch: Seq[ScheduledSequence]) -> StepHandle:
        """Launch any step, kernel by kernel."""
        sequences = [item.sequence for item in batch]
        metadata = AttentionMetadata.from_spans([SequenceSpan.of(item) for item in batch], block_size=self._block_size)
        rows = self._tables.assign(sequences)
        columns = PackedColumns()
        step = RaggedColumns.add(batch, metadata, rows, self._ops.tile_tokens, columns)
        update = self._tables.plan(sequences, rows, columns)
        samples = SamplesPlan.of(batch, metadata, self._sampler, columns)
        wanted = [each for i, item in enumerate(batch) for each in _prompt_logprobs(i, item, metadata, columns)]
        rows_of_logits = [slice(each.first_token, each.first_token + each.num_rows) for each in wanted]
        self._send(step, columns, update, (*rows_of_logits, *([samples.last_tokens] if samples is not None else [])))
        words = columns.upload(self._device)
        self._tables.apply(update, words)
        token_ids = step.input_ids(words, self._decode.last_sampled)
        hidden = self._model.forward(token_ids, self._ops.bind(step.on_device(words, self._tables.tables)))
        logprobs = tuple((each.item_idx, self._fetch_prompt_logprobs(each, hidden, words)) for each in wanted)
        pooled = self._fetch_pooled(batch, metadata, hidden)
        if samples is None:
            return self._launched(batch, words, prompt_logprobs=logprobs, pooled=pooled)
        raced = samples.run_race(self._model, hidden, words)
        return self._launched(batch, words, raced, samples.sampling, prompt_logprobs=logprobs, pooled=pooled)

    def _launched(
        self,
        batch: Seq[ScheduledSequence],
        words: Tensor,
        raced: Raced | None = None,
        sampling: SamplingPlan | None = None,
        *,
        prompt_logprobs: tuple[tuple[int, LogprobsFetch], ...] = (),
        pooled: PooledFetch | None = None,
    ) -> LaunchedStep:
        """Return a step of which the tokens are still to be chosen: at once, or later without a plan."""
        chosen = None if raced is None or sampling is None else self._choose(raced, sampling, words)
        return LaunchedStep(
            num_samples=tuple(item.num_samples for item in batch),
            chosen=chosen,
            choose_late=None if raced is None else partial(self._choose_late, batch, raced),
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            # Others may fetch the KV of a step that samples nothing: its results must wait for it too.
            ended=device_for(self._device).fetch(words[:1]) if chosen is None else None,
        )

    def _choose(self, raced: Raced, sampling: SamplingPlan, words: Tensor) -> Chosen:
        """Choose tokens, and leave them where the next step may read them."""
        last_sampled = self._decode.last_sampled
        chosen = sampling.choose(raced.logits, words, raced.token_ids, last_sampled)
        # The negative token of a failed row is not an index.
        torch.clamp(chosen.token_ids, min=0, out=last_sampled[: len(chosen.token_ids)])
        return chosen

    @torch.inference_mode()
    def _choose_late(self, batch: Seq[ScheduledSequence], raced: Raced) -> Chosen:
        """Choose the tokens of a batch whose inputs the host has got to know."""
        with self._ending_with_errors():
            columns = PackedColumns()
            rows = [row for item in batch if item.num_samples for row in sampling_rows(item)]
            sampling = self._sampler.plan_rest(rows, columns)
            return self._choose(raced, sampling, columns.upload(self._device))

    def _send(
        self,
        step: DecodeColumns | RaggedColumns,
        columns: PackedColumns,
        update: TableUpdate,
        logits: tuple[Column | slice, ...] = (),
    ) -> None:
        """Let other ranks launch the step, too."""
        if self.announce is not None:
            update = replace(update, contents={})
            self.announce(SentStep(words=columns.words(), update=update, step=step, logits=logits))

    def _fetch_prompt_logprobs(self, wanted: _PromptLogprobs, hidden: Tensor, words: Tensor) -> LogprobsFetch:
        logits = self._model.logits(hidden[wanted.first_token : wanted.first_token + wanted.num_rows])
        return fetch_logprobs(logits, wanted.targets.of(words), wanted.num_top)

    def _fetch_pooled(
        self, batch: Seq[ScheduledSequence], metadata: AttentionMetadata, hidden: Tensor
    ) -> PooledFetch | None:
        """Start copying the parts of embeddings that the step has computed; None without any."""
        spans = [(i, item.first_pooled) for i, item in enumerate(batch)]
        places = metadata.query_start_loc
        sums = {
            i: hidden[int(places[i]) + first : int(places[i + 1])].sum(dim=0, dtype=torch.float32)
            for i, first in spans
            if first is not None
        }
        if not sums:
            return None
        words = torch.stack(list(sums.values())).double().view(torch.int64)
        return PooledFetch(device_for(self._device).fetch(words.view(-1)), tuple(sums))


def _is_decode(item: ScheduledSequence) -> bool:
    return item.num_new_tokens == 1 and item.num_samples == 1 and not _wants_prompt_logprobs(item)


def _wants_prompt_logprobs(item: ScheduledSequence) -> bool:
    sequence = item.sequence
    return (
        sequence.request.sampling.num_prompt_logprobs is not None
        and sequence.num_computed + 1 < sequence.num_prompt_tokens
    )


def _prompt_logprobs(
    item_idx: int, item: ScheduledSequence, metadata: AttentionMetadata, columns: PackedColumns
) -> Iterator[_PromptLogprobs]:
    """Yield a sequence's prompt positions in this step whose next prompt tokens get log-probabilities."""
    sequence = item.sequence
    num_top = sequence.request.sampling.num_prompt_logprobs
    if num_top is None:
        return
    first_token = int(metadata.query_start_loc[item_idx])
    targets = sequence.token_ids[sequence.num_computed + 1 : sequence.num_prompt_tokens][: item.num_new_tokens]
    for begin in range(0, len(targets), _LOGPROB_ROWS):
        rows = targets[begin : begin + _LOGPROB_ROWS]
        yield _PromptLogprobs(
            item_idx=item_idx,
            first_token=first_token + begin,
            targets=columns.ints(rows),
            num_rows=len(rows),
            num_top=num_top,
        )

"""Executors of tiny models, and a driver that runs sequences through an executor as the engine core would."""

import random
from array import array
from collections import deque
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.block_hash import NO_HASHES
from common.ids import BlockId, HashRoot, RequestId
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.cuda.executor import CudaExecutor
from engine.cuda.loading import load_cuda_executor
from engine.executor import Executor, ScheduledSequence, StepHandle, StepResult
from engine.kv_store import has_windows
from engine.loading import load_executor
from engine.options import EngineOptions, ModelDescription
from engine.pages.window_pages import NO_PAGE
from engine.request import EngineRequest
from engine.runner import ModelExecutor
from engine.sequence import Sequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _options(model_dir: Path, **overrides: Any) -> EngineOptions:
    sizes = {"block_size": 4, "num_blocks": 128}
    return EngineOptions(**{"model_dir": model_dir, "model_name": "tiny", "dtype": "float32", **sizes, **overrides})


def load(model_dir: Path, **overrides: Any) -> ModelExecutor[Any]:
    """Return a float32 CPU executor."""
    executor = load_executor(_options(model_dir, device="cpu", **overrides))
    assert isinstance(executor, ModelExecutor)
    return executor


def load_device(model_dir: Path, **overrides: Any) -> CudaExecutor:
    """Return a float32 device executor, on the GPU or on the CPU."""
    options = _options(model_dir, **{"device": DEVICE, "max_step_tokens": 64, "max_running": 8, **overrides})
    return load_cuda_executor(ModelDescription.read(options), options)


class EveryThird:
    """The grammar of answers whose token i is i more than a multiple of 3; also its state."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def begin(self) -> "EveryThird":
        """See `Grammar`."""
        return self

    def allowed_along(self, output: Seq[int], draft: Seq[int]) -> list[npt.NDArray[np.bool_]]:
        """See `GrammarState`."""
        first = len(output)
        return [
            np.arange(self._vocab_size) % 3 == num_before % 3 for num_before in range(first, first + len(draft) + 1)
        ]


def make_sequence(
    prompt: Seq[int], *, sampling: SamplingParams = GREEDY, block_size: int = 4, grammar: Any = None
) -> Sequence:
    """Return a fresh sequence without pages."""
    request = EngineRequest(
        request_id=RequestId("req-test"),
        prompt_token_ids=as_tokens(prompt),
        sampling=sampling,
        hash_root=HashRoot(bytes(32)),
        block_hashes=NO_HASHES,
        grammar=grammar,
    )
    return Sequence.from_request(request, block_size=block_size, order=0)


class Driver:
    """Hands out pages in a scrambled order and keeps as many steps in flight as the executor takes.

    With two of them, step n + 1 is planned while n is in flight, with inputs by row where tokens are pending.
    """

    def __init__(self, executor: Executor, *, seed: int = 0) -> None:
        self.executor = executor
        self.num_overlapped = 0
        """Input tokens so far whose ids were not known at the launch."""
        self._block_size = executor.kv.shape.block_size
        self._free_states: list[int] = []
        if executor.kv.shape.state_layers:
            assert has_windows(executor.kv), f"{executor.kv} has no pages for states"
            executor.kv.window_page_of[:] = array("i", [NO_PAGE]) * executor.kv.num_blocks
            self._free_states += range(executor.kv.num_window_pages)
        elif has_windows(executor.kv):  # a window page for every block
            executor.kv.window_page_of[:] = array("i", range(executor.kv.num_blocks))
        self.free = [BlockId(i) for i in range(executor.kv.num_blocks)]
        random.Random(seed).shuffle(self.free)
        self._in_flight: deque[tuple[list[ScheduledSequence], StepHandle]] = deque()
        self._pending_rows: dict[Sequence, int] = {}

    def generate(self, sequences: Seq[Sequence], *, num_tokens: int, chunk_size: int = 1 << 30) -> list[list[int]]:
        """Return each sequence's answer: first samples only. Sequence i joins at step i, so that steps are mixed."""
        num_joined = 0
        while any(s.num_output_tokens < num_tokens for s in sequences):
            num_joined += 1
            batch = [item for s in sequences[:num_joined] if (item := self._plan(s, num_tokens, chunk_size))]
            self.launch(batch)
            while len(self._in_flight) > (self.executor.max_steps_in_flight - 1 if batch else 0):
                self.take()
        while self._in_flight:
            self.take()
        return [list(s.output_token_ids) for s in sequences]

    def step(self, work: Seq[tuple[Sequence, int]]) -> list[StepResult]:
        """Run (sequence, number of new tokens) pairs in one step."""
        self.launch([_item(sequence, num_new) for sequence, num_new in work])
        return self.take()

    def launch(self, batch: list[ScheduledSequence]) -> None:
        """Launch a batch and move its sequences on."""
        if not batch:
            return
        for item in batch:
            table = item.sequence.block_table
            while len(table) * self._block_size < item.sequence.num_computed + item.num_new_tokens:
                table.append(self.free.pop())
            self._attach_states(item)
        self._in_flight.append((batch, self.executor.launch(batch)))
        self._pending_rows.clear()
        row = 0
        for item in batch:
            item.sequence.num_computed += item.num_new_tokens
            if item.num_samples:
                self._pending_rows[item.sequence] = row
            row += item.num_samples

    def _attach_states(self, item: ScheduledSequence) -> None:
        """Leave a state page to the block of the latest token, and give one to that in which the step ends."""
        store, sequence = self.executor.kv, item.sequence
        if not store.shape.state_layers or not has_windows(store):
            return
        ends = (sequence.num_computed, sequence.num_computed + item.num_new_tokens)
        source, target = (sequence.block_table[max(0, end - 1) // self._block_size] for end in ends)
        for block_id in sequence.block_table:
            if block_id != source and store.window_page_of[block_id] != NO_PAGE:
                self._free_states.append(store.window_page_of[block_id])
                store.window_page_of[block_id] = NO_PAGE
        if store.window_page_of[target] == NO_PAGE:
            store.window_page_of[target] = self._free_states.pop(0)

    def take(self) -> list[StepResult]:
        """Take the oldest step's results; appends the first sample's token to each sequence."""
        batch, handle = self._in_flight.popleft()
        results = handle.results()
        for item, result in zip(batch, results, strict=True):
            assert len(result.sampled) == item.num_samples
            if result.sampled:
                item.sequence.append_token(result.sampled[0].token_id)
        if self._in_flight:
            self._in_flight[0][1].choose()
        return results

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages while nothing is in flight."""
        assert not self._in_flight
        assert not self.executor.kv.shape.state_layers, "the pages of states would stay"
        self.free.extend(BlockId(block_id) for block_id in reversed(sequence.block_table))
        sequence.block_table = array("i")
        sequence.num_computed = 0

    def _plan(self, sequence: Sequence, num_tokens: int, chunk_size: int) -> ScheduledSequence | None:
        has_pending = any(
            item.sequence is sequence and item.num_samples for batch, _ in self._in_flight for item in batch
        )
        if sequence.num_output_tokens + has_pending >= num_tokens:
            return None
        if not has_pending:
            return _item(sequence, min(chunk_size, sequence.num_tokens - sequence.num_computed))
        if sequence.waits_for_tokens:
            return None
        self.num_overlapped += 1
        return ScheduledSequence(sequence, 1, 1, input_row=self._pending_rows[sequence])


def _item(sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
    is_last = sequence.num_computed + num_new_tokens == sequence.num_tokens
    return ScheduledSequence(sequence, num_new_tokens, sequence.num_samples if is_last else 0)

"""A device executor of a tiny model, and a driver that launches a step before it knows the last one's tokens."""

import random
from collections import deque
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from common.ids import BlockId
from engine.cuda.executor import CudaExecutor
from engine.cuda.loading import load_cuda_executor
from engine.executor import Executor, ScheduledSequence, StepHandle, StepResult
from engine.options import EngineOptions, ModelDescription
from engine.sequence import Sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_device(model_dir: Path, **overrides: Any) -> CudaExecutor:
    """Return a float32 executor on the GPU, or on the CPU."""
    options: dict[str, Any] = {
        "model_dir": model_dir,
        "model_name": "tiny",
        "dtype": "float32",
        "device": DEVICE,
        "block_size": 4,
        "num_blocks": 128,
        "kv_memory_bytes": None,
        "max_model_len": None,
        "max_step_tokens": 64,
        "max_running": 8,
    }
    chosen = EngineOptions(**{**options, **overrides})
    return load_cuda_executor(ModelDescription.read(chosen), chosen)


class OverlapDriver:
    """Plays the core: plans step n + 1 while n is in flight, with inputs by row where tokens are pending."""

    def __init__(self, executor: Executor, *, seed: int = 0) -> None:
        self.executor = executor
        self.num_overlapped = 0
        """Input tokens so far whose ids were not known at the launch."""
        self._block_size = executor.kv.shape.block_size
        self.free = [BlockId(i) for i in range(executor.kv.num_blocks)]
        random.Random(seed).shuffle(self.free)
        self._in_flight: deque[tuple[list[ScheduledSequence], StepHandle]] = deque()
        self._pending_rows: dict[Sequence, int] = {}
        self.results: list[StepResult] = []

    def generate(self, sequences: Seq[Sequence], *, num_tokens: int, chunk_size: int = 1 << 30) -> list[list[int]]:
        """Return each sequence's answer. Sequence i joins at step i; first samples only."""
        num_joined = 0
        while any(s.num_output_tokens < num_tokens for s in sequences):
            num_joined += 1
            batch = [item for s in sequences[:num_joined] if (item := self._plan(s, num_tokens, chunk_size))]
            self.launch(batch)
            while len(self._in_flight) > (1 if batch else 0):
                self.take()
        while self._in_flight:
            self.take()
        return [list(s.output_token_ids) for s in sequences]

    def launch(self, batch: list[ScheduledSequence]) -> None:
        """Launch a batch and move its sequences on."""
        if not batch:
            return
        for item in batch:
            table = item.sequence.block_table
            while len(table) * self._block_size < item.sequence.num_computed + item.num_new_tokens:
                table.append(self.free.pop())
        self._in_flight.append((batch, self.executor.launch(batch)))
        self._pending_rows.clear()
        row = 0
        for item in batch:
            item.sequence.num_computed += item.num_new_tokens
            if item.num_samples:
                self._pending_rows[item.sequence] = row
            row += item.num_samples

    def take(self) -> None:
        """Take the oldest step's results."""
        batch, handle = self._in_flight.popleft()
        self.results = handle.results()
        for item, result in zip(batch, self.results, strict=True):
            assert len(result.sampled) == item.num_samples
            if result.sampled:
                item.sequence.append_token(result.sampled[0].token_id)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages, when nothing is in flight."""
        assert not self._in_flight
        self.free.extend(BlockId(block_id) for block_id in reversed(sequence.block_table))
        sequence.block_table = sequence.block_table[:0]
        sequence.num_computed = 0

    def _plan(self, sequence: Sequence, num_tokens: int, chunk_size: int) -> ScheduledSequence | None:
        has_pending = any(
            item.sequence is sequence and item.num_samples for batch, _ in self._in_flight for item in batch
        )
        if sequence.num_output_tokens + has_pending >= num_tokens:
            return None
        if not has_pending:
            num_new = min(chunk_size, sequence.num_tokens - sequence.num_computed)
            is_last = sequence.num_computed + num_new == sequence.num_tokens
            return ScheduledSequence(sequence, num_new, 1 if is_last else 0)
        if sequence.request.sampling.has_penalties:
            return None
        self.num_overlapped += 1
        return ScheduledSequence(sequence, 1, 1, input_row=self._pending_rows[sequence])

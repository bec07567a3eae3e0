"""Steps in which every sequence decodes one token: one CUDA graph per batch size, captured at start.

A decode step is some hundred small kernels, which the host launches more slowly than the device runs them. A graph is
one launch. It has a batch size and fixed addresses: a smaller batch is padded, and inputs are copied to where the graph
reads them (see `buffers`).
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.cuda.buffers import DecodeColumns, DecodeLayout
from engine.device.columns import PackedColumns
from engine.device.devices import device_for
from engine.executor import ScheduledSequence
from engine.model.decoder import Decoder
from engine.ops.interface import StepOps
from engine.ops.triton_kernels.step import DeviceStep
from engine.sampling.draw import first_best
from engine.sampling.logits import SamplingRow

logger = logging.getLogger(__name__)

# Words of the arena for a step's other inputs, such as sampling parameters and new pages. Larger ones go elsewhere.
_ROOM_WORDS = 1 << 14


class DeviceOps(Protocol):
    """Kernels that take a step from tensors of the device."""

    name: str

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile in `DeviceStep.prefill_tiles`."""
        ...

    def bind(self, step: DeviceStep) -> StepOps:
        """Return a step's operations. Their launches may be replayed on refilled tensors while the result lives."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """Results of a decode step, [batch size, ...]; rows of padding are undefined."""

    logits: Tensor
    """float32."""
    token_ids: Tensor
    """Tokens of plain rows and of those that race, int64; see `RaceColumns`."""
    ops: StepOps
    """Owner of memory that the graph's kernels use."""


def decode_sizes(max_seqs: int) -> list[int]:
    """Return the batch sizes that get a graph, ascending; the last is `max_seqs`.

    Their distances grow with size, so that they are few and padding is less than half of a batch. Padding costs little:
    small batches are bound by reading the weights, and padding reads no KV.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 129, 16), *range(160, 257, 32), *range(320, max_seqs, 64)]
    return [*(size for size in sizes if size < max_seqs), max_seqs]


class DecodeGraphs:
    """Runs decode steps by graph, or kernel by kernel for sizes without one. Engine thread only.

    `tables` are the block tables of all rows, int32 [num_rows, max_blocks]; no step has more samples than rows.
    `sizes` are the batch sizes that steps are padded to, ascending.
    """

    def __init__(
        self, model: Decoder, ops: DeviceOps, tables: Tensor, *, sizes: tuple[int, ...], block_size: int
    ) -> None:
        self._model = model
        self._ops = ops
        self._tables = tables
        self._sizes = sizes
        self._block_size = block_size
        self._head_words = -(-len(tables) // 2) * 2
        largest = PackedColumns()
        self.add((), (), sizes[-1], largest)
        device = tables.device
        self._arena = torch.zeros(self._head_words + largest.num_words + _ROOM_WORDS, dtype=torch.int64, device=device)
        self._query_start_loc = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)
        self._step_tables = torch.zeros((sizes[-1], tables.shape[1]), dtype=torch.int32, device=device)
        self._captured: dict[int, Callable[[], DecodeOutput]] = {}

    @property
    def last_sampled(self) -> Tensor:
        """Tokens that the last step sampled, int64 [num_rows], none negative; written by the code that samples."""
        return self._arena[: len(self._tables)]

    def size_for(self, num_seqs: int) -> int | None:
        """Return the batch size to pad to; None when the batch is too large."""
        return next((size for size in self._sizes if size >= num_seqs), None)

    def capture(self) -> None:
        """Capture a graph for every size. When that fails, steps run kernel by kernel, and the log gives the reason."""
        started_s = time.monotonic()
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            columns = PackedColumns()
            step = self.add((), (), size, columns)
            self.upload(step, columns)
            try:
                self._captured[size] = device_for(self._arena.device).capture(partial(self._launch, step))
            except RuntimeError as error:
                logger.warning(
                    "decode steps of some sizes are launched kernel by kernel: their graph cannot be captured",
                    extra={"largest_size": size, "reason": str(error)},
                )
                break
        logger.info(
            "decode graphs captured",
            extra={"sizes": sorted(self._captured), "capture_s": round(time.monotonic() - started_s, 3)},
        )

    def add(
        self,
        batch: Seq[ScheduledSequence],
        rows: Seq[int],
        size: int,
        columns: PackedColumns,
        *,
        samples: Seq[SamplingRow] = (),
    ) -> DecodeColumns:
        """Add a batch of at most `size` sequences, with its rows of the tables, as the first columns of a step.

        `samples` are the batch's sampling rows.
        """
        layout = DecodeLayout(size=size, head_words=self._head_words, block_size=self._block_size)
        return DecodeColumns.add(batch, rows, samples, layout, columns)

    def upload(self, step: DecodeColumns, columns: PackedColumns) -> Tensor:
        """Start copying a step's columns to where `run` reads them; return the packed words."""
        return columns.upload_into(self._arena[self._head_words :], num_fixed=step.num_words)

    def run(self, step: DecodeColumns) -> DecodeOutput:
        """Launch the uploaded step. The result is valid until the next one is launched."""
        captured = self._captured.get(step.size)
        return self._launch(step) if captured is None else captured()

    def _launch(self, step: DecodeColumns) -> DecodeOutput:
        words = self._arena[self._head_words :]
        block_tables = self._step_tables[: step.size]
        torch.index_select(self._tables, 0, step.table_rows.of(words), out=block_tables)
        ops = self._ops.bind(
            DeviceStep(
                positions=step.positions.of(words),
                slot_mapping=step.slot_mapping.of(words),
                context_lens=step.context_lens.of(words),
                block_tables=block_tables,
                query_start_loc=self._query_start_loc[: step.size + 1],
                decode_seqs=None,
                prefill_tiles=None,
            )
        )
        token_ids = self._arena.index_select(0, step.token_places.of(words))
        logits = self._model.logits(self._model.forward(token_ids, ops))
        token_ids = step.race.choose(logits, first_best(logits), words)
        return DecodeOutput(logits=logits, token_ids=token_ids, ops=ops)

"""Copies blocks between device pages and other memory, concurrently with the engine's steps.

The step loop never waits for a copy, and a copy waits for no step: copies have their own streams, without events
between those and the engine's. The host orders them by three rules.

    written before read   A block is offered to a puller after `StepHandle.results` of the step that wrote it, which
                          waits for that step on the device. A copy in any stream or process then finds its bytes.
    arrived before used   `write_blocks` and `copy_blocks` return when the copy has ended on the device. A pull returns
                          after them; only then does `commit` let a step read the pages.
    free before given     A page is reserved for a pull only when no launched step can write to it any more (the engine
                          core's rule). A page that is read stays held until its handoff ends. When that is aborted
                          during a copy, the copy may see the next owner's bytes; they are not used, since the abort
                          also fails their call.

Staging memory is pinned and allocated once: allocating it later would wait for the whole device.

A block lies in one piece, as it travels. To and from host memory a copy engine moves it, beside the step's kernels;
blocks that follow each other are one copy. Inside the device, or from a mapped card, one kernel moves all of them,
since to launch a copy of each would take longer than the copies.
"""

import logging
import queue
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from common.errors import LayoutMismatch
from engine.kv_store import PIECE_BYTES, KvShape, check_ids

logger = logging.getLogger(__name__)

MoveBlocks = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(source, source ids, target, target ids): copy block source_ids[i] over block target_ids[i], on the current stream.

Source and target are [num_blocks, words_per_block], ids int64 on their device and in range, target ids distinct.
Mutates the target.
"""

_NUM_LANES = 2
_MAX_IDS = 8192


class DevicePages:
    """Pages in device memory, as bytes. Any thread, for blocks that the caller holds.

    `memory` is uint8 [num_blocks * block_bytes]. On a CPU the same code runs without streams.
    """

    def __init__(self, memory: Tensor, shape: KvShape, *, staging_bytes: int = PIECE_BYTES) -> None:
        self.shape = shape
        self.blocks = self.view_of(memory)
        """Integers [num_blocks, words_per_block]."""
        self._move = _choose_move(memory.device)
        self._lanes: queue.LifoQueue[_Lane] = queue.LifoQueue()
        blocks_per_lane = min(max(1, staging_bytes // shape.block_bytes), len(self.blocks), _MAX_IDS)
        for _ in range(_NUM_LANES):
            self._lanes.put(_Lane(self.blocks, blocks_per_lane))
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # the pages were zeroed on another stream
        self.copy_blocks(self.blocks, [0], [0])  # compile the kernel now, not during the first request

    def read_blocks(self, block_ids: Seq[int]) -> memoryview:
        """Return a copy of the blocks' bytes, [len(block_ids) * block_bytes]. Raises LayoutMismatch for a bad id."""
        check_ids(block_ids, len(self.blocks))
        block_bytes = self.shape.block_bytes
        data = np.empty(len(block_ids) * block_bytes, dtype=np.uint8)
        with self._lane() as lane:
            for first in range(0, len(block_ids), lane.num_blocks):
                ids = block_ids[first : first + lane.num_blocks]
                self._fetch(lane, ids, lane.host[: len(ids)])
                data[first * block_bytes : (first + len(ids)) * block_bytes] = lane.host_bytes(len(ids))
        return data.data

    def read_into(self, host: Tensor, block_ids: Seq[int]) -> None:
        """Fill host memory, uint8 [len(block_ids) * block_bytes], as `read_blocks` returns it.

        Copies to pinned memory are faster. Raises LayoutMismatch for a bad id.
        """
        check_ids(block_ids, len(self.blocks))
        target = host.view(self.blocks.dtype).view(-1, self.blocks.shape[1])
        with self._lane() as lane:
            for first in range(0, len(block_ids), lane.num_blocks):
                ids = block_ids[first : first + lane.num_blocks]
                self._fetch(lane, ids, target[first : first + len(ids)])

    def write_blocks(self, block_ids: Seq[int], data: memoryview) -> None:
        """Fill blocks from bytes laid out as `read_blocks` returns them. Raises LayoutMismatch for a bad id or size."""
        check_ids(block_ids, len(self.blocks))
        block_bytes = self.shape.block_bytes
        self.shape.check_data(data, len(block_ids))
        source = np.frombuffer(data, dtype=np.uint8)
        with self._lane() as lane:
            for first in range(0, len(block_ids), lane.num_blocks):
                ids = block_ids[first : first + lane.num_blocks]
                lane.host_bytes(len(ids))[:] = source[first * block_bytes : (first + len(ids)) * block_bytes]
                with lane.running():
                    for at, own in _runs(ids):
                        self.blocks[own].copy_(lane.host[at], non_blocking=True)

    def copy_blocks(self, source: Tensor, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy blocks of `source`, a `view_of` memory that this device reads, over blocks of these pages, and wait.

        Raises LayoutMismatch for a bad id, or different numbers of sources and targets.
        """
        if len(sources) != len(targets):
            raise LayoutMismatch(f"{len(sources)} blocks cannot be copied over {len(targets)}")
        check_ids(sources, len(source))
        check_ids(targets, len(self.blocks))
        with self._lane() as lane:
            for first in range(0, len(sources), _MAX_IDS):
                with lane.running():
                    source_ids = lane.upload(0, sources[first : first + _MAX_IDS])
                    target_ids = lane.upload(1, targets[first : first + _MAX_IDS])
                    self._move(source, source_ids, self.blocks, target_ids)

    def read_bytes(self, source: Tensor) -> bytes:
        """Return the bytes of a small uint8 tensor on this device, without waiting for the engine's stream."""
        with self._lane() as lane, lane.running():
            return bytes(source.tolist())

    def view_of(self, memory: Tensor) -> Tensor:
        """Return memory of blocks of this shape, uint8 [num_blocks * block_bytes], as [num_blocks, words_per_block].

        The widest integers of which a block is a whole number: the dtype of the pages does not matter.
        """
        block_bytes = self.shape.block_bytes
        words = (torch.int64, torch.int32, torch.int16, torch.uint8)
        return memory.view(-1, block_bytes).view(next(each for each in words if block_bytes % each.itemsize == 0))

    def _fetch(self, lane: "_Lane", ids: Seq[int], host: Tensor) -> None:
        """Copy at most a lane's blocks to host memory, and wait for the copy."""
        with lane.running():
            for at, own in _runs(ids):
                host[at].copy_(self.blocks[own], non_blocking=True)

    @contextmanager
    def _lane(self) -> "Iterator[_Lane]":
        lane = self._lanes.get()  # more threads than lanes wait: they would share one copy engine anyway
        try:
            yield lane
        finally:
            self._lanes.put(lane)


class _Lane:
    """A stream with its staging memory; one copy at a time."""

    def __init__(self, blocks: Tensor, num_blocks: int) -> None:
        device = blocks.device
        is_cuda = device.type == "cuda"
        self.num_blocks = num_blocks
        self.host = torch.empty((num_blocks, blocks.shape[1]), dtype=blocks.dtype, pin_memory=is_cuda)
        self._host_ids = torch.empty((2, _MAX_IDS), dtype=torch.int64, pin_memory=is_cuda)
        self._ids = torch.empty((2, _MAX_IDS), dtype=torch.int64, device=device)
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        # A blocking event: a spinning thread would take a core from the step loop.
        self._ended = torch.cuda.Event(blocking=True) if is_cuda else None  # type: ignore[no-untyped-call]

    def host_bytes(self, num_blocks: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the first blocks of the host staging as bytes."""
        flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = self.host[:num_blocks].view(-1).view(torch.uint8).numpy()
        return flat

    def upload(self, row: int, ids: Seq[int]) -> Tensor:
        """Return block ids on the device; once per row and `running`."""
        self._host_ids[row, : len(ids)] = torch.as_tensor(np.asarray(ids, dtype=np.int64))
        uploaded = self._ids[row, : len(ids)]
        uploaded.copy_(self._host_ids[row, : len(ids)], non_blocking=True)
        return uploaded

    @contextmanager
    def running(self) -> Iterator[None]:
        """Launch on this lane's stream; the exit waits, without the interpreter lock, until all of it has ended."""
        if self._stream is None or self._ended is None:
            with torch.inference_mode():
                yield
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._ended.record(self._stream)
                self._ended.synchronize()


def _runs(block_ids: Seq[int]) -> Iterator[tuple[slice, slice]]:
    """Yield runs of blocks that follow each other: their places among the ids, and among all blocks."""
    begin = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            first = block_ids[begin]
            yield slice(begin, end), slice(first, first + end - begin)
            begin = end


def move_blocks_in_torch(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Move blocks by a gather, a temporary copy and a scatter; a `MoveBlocks` for any device."""
    target.index_copy_(0, target_ids, source.index_select(0, source_ids))


def _choose_move(device: torch.device) -> MoveBlocks:
    if device.type == "cuda":
        try:
            from engine.device.move_blocks import move_blocks
        except ImportError as error:
            logger.warning("blocks are moved in two passes, by torch: %s", error)
        else:
            return move_blocks
    return move_blocks_in_torch

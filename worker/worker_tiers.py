"""A worker's tiers at work: published blocks go in as they come, blocks of prompts come back into pages.

*In*: a block is copied soon after it was published (`tier_writes.py`).

*Back*: reading is a pull like that from another worker (`prefix_pull.py`): into reserved pages, verified by the tier,
published piece by piece, in no more time than computing would take (`tier_reads.py`). Other workers get what they pull
straight from the tiers (`tier_serving.py`).

A disk that hangs or fails holds up neither requests nor transfers nor the end of the worker.
"""

import logging
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from common.block_hash import BlockHashes
from common.clock import Clock
from common.config import TiersConfig
from common.ids import BlockHash, HashRoot
from common.kv_events import KvEvents
from engine.events import EngineLoad, StepReport
from engine.kv_store import KvShape, KvStore
from engine.steps.landing import Landing
from kv_tiers.tiers import DISK, Tiers, TierSettings
from kv_transfer.offloaded import OffloadedBlocks, OffloadedPiece
from kv_transfer.transports.transport import to_end
from kvrelay.v1 import kv_transfer_pb2 as pb
from worker.held_blocks import HeldBlocks
from worker.read_gate import ReadGate
from worker.tier_reads import TierReads, piece_blocks
from worker.tier_serving import TierServing
from worker.tier_writes import TierWrites

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class WorkerTiers:
    """The tiers of one worker. Event loop only, but for what runs in threads. Close with `aclose`."""

    def __init__(
        self,
        tiers: Tiers,
        *,
        store: KvStore,
        lives: "array[int]",
        clock: Clock,
        on_changes: Callable[[KvEvents], None],
        gate: ReadGate,
    ) -> None:
        """`lives`: see `Engine.report_published`."""
        self.tiers = tiers
        self._store = store
        self._gate = gate
        self.num_skipped = 0
        """Reads that were not made, since computing was predicted to be sooner."""
        self._held = HeldBlocks()
        self._reads = TierReads(tiers, store, clock, gate.note_read)
        self.serving = TierServing(tiers, store.shape, clock, gate.note_read)
        """Reads for other workers."""
        self.writes = TierWrites(tiers, store=store, lives=lives, clock=clock, held=self._held, on_changes=on_changes)
        """Writes of published blocks."""
        self._may_return = False

    def start(self) -> None:
        """Begin to write."""
        self.writes.start()

    async def aclose(self) -> None:
        """Write what was offered, as far as there is time, and close the tiers. A write that hangs is left behind."""
        await self.writes.aclose()
        self._reads.close()
        self.serving.close()
        try:
            await to_end(self.tiers.close)
        except OSError:  # a disk that fails to the last
            logger.exception("cannot close the tiers")

    def take(self, report: StepReport) -> KvEvents:
        """Take note of a step: what was published, and what the pages hold. Returns what routers are told."""
        has_work = report.load.num_running + report.load.num_waiting > 0
        self.writes.offer(report.published, is_busy=has_work)
        return self._held.of_pages(report.kv_events)

    def measured(self, load: EngineLoad) -> EngineLoad:
        """Return a load with how full the tiers are."""
        num_held = len(self._held.in_tiers)  # more than the larger tier holds, where one has missed writes
        return replace(load, num_tier_blocks=num_held, max_tier_blocks=max(self.writes.stats.capacity, num_held))

    async def snapshot(self, of_pages: KvEvents) -> KvEvents:
        """Return all blocks that the worker holds; `of_pages`: those in pages."""
        return await to_end(self._held.snapshot, of_pages)

    async def forget(self, root: HashRoot) -> int:
        """Drop a tenant's blocks from all tiers and overwrite them on disk; returns how many there were.

        What has left the pages before does not come in any more: the piece that is being written ends first.
        """
        async with self.writes.turn:
            self._may_return = self._reads.is_stuck
            num_blocks = await self.writes.in_thread(self.tiers.forget, root)
            await self.writes.tell_changes()
        return num_blocks

    @property
    def obstacle(self) -> str:
        """Why blocks that were forgotten may still be here, or come back; empty: they do not."""
        if self._may_return or self._reads.is_stuck:
            return "a read that was given up still waits for the disk: run it again when it has answered"
        disk = self.tiers.stats().tiers.get(DISK)
        return "; ".join(self.writes.stats.alarms) if disk is not None and not disk.capacity else ""

    # ── back ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def num_worth_reading(self, hashes: BlockHashes) -> int:
        """Return `num_readable` for a request that waits for the read; 0, too, where computing is sooner."""
        num_blocks, num_in_pages = self.num_readable(hashes), self._num_in_pages(hashes.digests())
        size = self._store.shape.block_size
        if num_blocks and not self._gate.lets((num_blocks - num_in_pages) * size, num_in_pages * size):
            self.num_skipped += 1
            return 0
        return num_blocks

    def num_readable(self, hashes: BlockHashes) -> int:
        """Return how many leading blocks of a prompt are in pages once the tiers are read; 0: no more than now."""
        self.writes.note_use(hashes)
        if self._reads.is_stuck:
            return 0
        digests = hashes.digests()
        num_in_pages = self._num_in_pages(digests)
        num_blocks = self._end_in_tiers(digests, num_in_pages)
        return num_blocks if num_blocks > num_in_pages else 0

    def _num_in_pages(self, digests: Sequence[BlockHash]) -> int:
        in_pages = self._held.in_pages
        return bisect_left(digests, 1, key=lambda block_hash: block_hash not in in_pages)

    def _end_in_tiers(self, digests: Sequence[BlockHash], first_block: int) -> int:
        """Return the index of the first of these blocks from one on that is not in tiers."""
        in_tiers = self._held.in_tiers
        return next((i for i in range(first_block, len(digests)) if digests[i] not in in_tiers), len(digests))

    async def read(self, landing: Landing, commit: Callable[[int], None]) -> int:
        """See `TierReads.read`."""
        try:
            return await self._reads.read(landing, commit)
        finally:
            self.writes.wake()  # blocks that could not be read have left the tiers

    # ── for other workers ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def staging(self) -> pb.SharedMemory | None:
        """See `Offloaded`."""
        return self.serving.staging

    def num_held(self, hashes: BlockHashes, first_block: int) -> int:
        """See `Offloaded`."""
        self.writes.note_use(hashes)
        is_stuck = self._reads.is_stuck or self.serving.is_stuck
        return first_block if is_stuck else self._end_in_tiers(hashes.digests(), first_block)

    @asynccontextmanager
    async def piece(self, wanted: OffloadedBlocks) -> AsyncIterator[OffloadedPiece]:
        """See `Offloaded`."""
        async with self.serving.piece(wanted) as piece:
            if piece.num_blocks < min(len(wanted.hashes), piece_blocks(self._store.shape)):
                self.writes.wake()  # likewise
            yield piece


def open_tiers(config: TiersConfig, shape: KvShape) -> Tiers | None:
    """Return the tiers of a new worker with what its predecessor left on disk; None: it has none. Takes seconds."""
    if not config.is_on:
        return None
    return Tiers.open(
        TierSettings(
            host_bytes=int(config.host_gib * _GIB),
            disk_bytes=int(config.disk_gib * _GIB),
            path=config.path and config.path.expanduser(),
            fingerprint=shape.fingerprint,
            block_bytes=shape.block_bytes,
        )
    )


def left_on_disk(config: TiersConfig) -> str:
    """Return why a worker without tiers may leave blocks on disk; empty: the folder has none. Reads the folder."""
    if config.path is None:
        return ""
    folder = config.path.expanduser()
    try:
        is_empty = not any(folder.iterdir())
    except OSError:
        is_empty = not folder.is_dir()
    return "" if is_empty else f"tiers are off, and {folder} still has files: remove it"

"""A worker's tiers at work: published blocks go in as they come, blocks of prompts come back into pages.

*In*: a block is copied soon after it was published, while its page keeps it, so that nothing has to be copied when the
page is given away. The copy counts if the page still holds the block at its end (`engine/published.py`). One
piece at a time is written, by a thread of its own, and beside a busy engine at most `_MAX_SHARE` of the time. A block
that has left its page before its turn is lost to the tiers, and counted.

*Back*: reading is a pull like that from another worker (`prefix_pull.py`): into reserved pages, verified by the tier,
published piece by piece, in no more time than computing would take (`tier_reads.py`). Other workers get what they pull
straight from the tiers (`tier_serving.py`).

A disk that hangs or fails holds up neither requests nor transfers nor the end of the worker.
"""

import asyncio
import logging
import os
import threading
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from common.block_hash import BlockHashes
from common.clock import Clock
from common.config import TiersConfig
from common.ids import BlockHash, HashRoot
from common.kv_events import KvEvents
from common.structured import end_all
from engine.events import EngineLoad, StepReport
from engine.kv_store import KvShape, KvStore
from engine.published import PublishedBlock
from engine.steps.landing import Landing
from kv_tiers.tiers import DISK, Tiers, TierSettings
from kv_transfer.offloaded import OffloadedBlocks, OffloadedPiece
from kv_transfer.transports.transport import to_end
from kvrelay.v1 import kv_transfer_pb2 as pb
from worker.held_blocks import HeldBlocks
from worker.read_gate import ReadGate
from worker.tier_reads import TierReads, piece_blocks
from worker.tier_serving import TierServing
from worker.tier_threads import TierThreads

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_GIB = 1 << 30
_MAX_SHARE = 0.25
"""Most of the time that is spent on writing while the engine has work."""
_NICE = 10
_MAX_PAUSE_S = 1.0
_MAX_USED = 1 << 20
"""Most blocks of prompts whose use is noted later."""
_MAX_LOOKED_AT = 1 << 14
"""Most offers that one turn of the event loop looks at."""
_CHANGES_AT_ONCE = 1 << 12
_PUBLISH_GAP_S = 0.02
"""Pause between so many changes: watchers merge what they have not sent."""
_FLUSH_S = 10.0
"""Time at the end for blocks that are not written yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Books:
    """State of the tiers, and what has changed since the last one."""

    capacity: int
    """Most blocks in all tiers, each counted once."""
    alarms: tuple[str, ...]
    """What is wrong with the tiers, and what to do."""
    changes: Sequence[Mapping[BlockHash, bool]]
    """Blocks that came to the tiers or left them, in pieces."""
    num_behind: int
    """Blocks that the disk is to get from host memory."""


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
        self.serving = TierServing(tiers, store.shape, clock, gate.note_read)
        """Reads for other workers."""
        self.num_missed = 0
        """Blocks that could not be copied, since they had left their pages or the tiers failed."""
        self._store = store
        self._lives = lives
        self._clock = clock
        self._on_changes = on_changes
        self._gate = gate
        self.num_skipped = 0
        """Reads that were not made, since computing was predicted to be sooner."""
        self._reads = TierReads(tiers, store, clock, gate.note_read)
        self._stride = piece_blocks(store.shape)
        self.alarms = tiers.stats().alarms
        """What was wrong with the tiers at their last use, and what to do. Any thread."""
        self._capacity = _capacity_of(tiers)
        self._held = HeldBlocks()
        self._held.in_tiers.update(tiers.drain_changes())  # all that a predecessor has left
        self._offered: deque[PublishedBlock] = deque()
        self._used: deque[BlockHashes] = deque()
        """Blocks of prompts that came since the last piece."""
        self._num_used = self._num_behind = 0
        self._is_busy = self._is_writing = self._may_return = False
        self._turn = asyncio.Lock()
        """Held while a piece is written and told of, and while blocks are forgotten."""
        self._woken, self._closing = asyncio.Event(), asyncio.Event()
        self._must_stop = False
        """Whether the thread that writes is to end after the block that it is at."""
        self._thread = TierThreads(1, name="tier-write", initializer=_step_back)
        self._writing: asyncio.Task[None] | None = None

    # ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        """Blocks and prompts that are not worked off."""
        return len(self._offered) + len(self._used) + self._num_behind + self._is_writing

    def start(self) -> None:
        """Begin to write."""
        self._writing = asyncio.get_running_loop().create_task(self._write_until_closed(), name="tiers")

    async def aclose(self) -> None:
        """Write what was offered, as far as there is time, and close the tiers. A write that hangs is left behind."""
        self._closing.set()
        self._woken.set()
        if self._writing is not None:
            _done, late = await asyncio.wait([self._writing], timeout=_FLUSH_S)
            self._must_stop = True
            await end_all(list(late))
        self._reads.close()
        self.serving.close()
        self._thread.shutdown()
        try:
            await to_end(self.tiers.close)
        except OSError:  # a disk that fails to the last
            logger.exception("cannot close the tiers")

    def take(self, report: StepReport) -> KvEvents:
        """Take note of a step: what was published, and what the pages hold. Returns what routers are told."""
        self._is_busy = report.load.num_running + report.load.num_waiting > 0
        if report.published:
            self._offered.extend(report.published)
            if len(self._offered) > 2 * self._store.num_blocks:
                self._drop_stale(2 * len(report.published))
            self._woken.set()
        return self._held.of_pages(report.kv_events)

    def measured(self, load: EngineLoad) -> EngineLoad:
        """Return a load with how full the tiers are."""
        num_held = len(self._held.in_tiers)  # more than the larger tier holds, where one has missed writes
        return replace(load, num_tier_blocks=num_held, max_tier_blocks=max(self._capacity, num_held))

    async def snapshot(self, of_pages: KvEvents) -> KvEvents:
        """Return all blocks that the worker holds; `of_pages`: those in pages."""
        return await to_end(self._held.snapshot, of_pages)

    def _drop_stale(self, num_blocks: int) -> None:
        """Look through the oldest offers. At most as many as there are pages stay."""
        for _ in range(min(num_blocks, len(self._offered))):
            block = self._offered.popleft()
            if block.is_in_place(self._lives):
                self._offered.append(block)
            else:
                self._miss(block)

    def _miss(self, block: PublishedBlock) -> None:
        self.num_missed += block.block_hash not in self._held.in_tiers

    async def _write_until_closed(self) -> None:
        while not self._closing.is_set() or self.num_waiting:
            await self._woken.wait()
            began_s = self._clock.monotonic()
            await self._write_piece()
            if not self.num_waiting and not self._closing.is_set():
                self._woken.clear()
            elif self._is_busy:
                busy_s = self._clock.monotonic() - began_s
                await self._pause(min(_MAX_PAUSE_S, busy_s * (1 / _MAX_SHARE - 1)))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _write_piece(self) -> None:
        async with self._turn:
            used, self._used, self._num_used = self._used, deque(), 0
            piece = self._next_piece()
            self._is_writing = True
            try:
                self.num_missed += await self._in_thread(self._work_off, used, piece)
                await self._tell_changes()
            finally:
                self._is_writing = False

    async def _in_thread(self, work: Callable[..., _Result], *args: object) -> _Result:
        """Run `work` in the thread that writes; a cancellation does not wait for it."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, *args))

    async def _tell_changes(self) -> None:
        """Tell what has come to the tiers, or left them. Under `_turn`: a later change is told later."""
        books = await self._in_thread(self._close_books)
        self._capacity, self.alarms, self._num_behind = books.capacity, books.alarms, books.num_behind
        for i, changes in enumerate(books.changes):
            if i:
                await asyncio.sleep(_PUBLISH_GAP_S)
            self._on_changes(self._held.of_tiers(changes))

    def _close_books(self) -> _Books:
        changes = list(self.tiers.drain_changes().items())
        return _Books(
            capacity=_capacity_of(self.tiers),
            alarms=self.tiers.stats().alarms,
            changes=[dict(changes[i : i + _CHANGES_AT_ONCE]) for i in range(0, len(changes), _CHANGES_AT_ONCE)],
            num_behind=self.tiers.num_behind,
        )

    async def forget(self, root: HashRoot) -> int:
        """Drop a tenant's blocks from all tiers and overwrite them on disk; returns how many there were.

        What has left the pages before does not come in any more: the piece that is being written ends first.
        """
        async with self._turn:
            self._may_return = self._reads.is_stuck
            num_blocks = await self._in_thread(self.tiers.forget, root)
            await self._tell_changes()
        return num_blocks

    @property
    def obstacle(self) -> str:
        """Why blocks that were forgotten may still be here, or come back; empty: they do not."""
        if self._may_return or self._reads.is_stuck:
            return "a read that was given up still waits for the disk: run it again when it has answered"
        disk = self.tiers.stats().tiers.get(DISK)
        return "; ".join(self.alarms) if disk is not None and not disk.capacity else ""

    def _next_piece(self) -> list[PublishedBlock]:
        piece: list[PublishedBlock] = []
        for _ in range(min(len(self._offered), _MAX_LOOKED_AT)):
            if len(piece) == self._stride:
                break
            block = self._offered.popleft()
            if block.is_in_place(self._lives):
                piece.append(block)
            else:
                self._miss(block)
        return piece

    def _work_off(self, used: Iterable[BlockHashes], piece: Iterable[PublishedBlock]) -> int:
        """Copy blocks from their pages into the tiers; returns how many were not. In a thread."""
        num_missed, left = 0, deque(piece)
        try:
            for hashes in used:
                self.tiers.touch(hashes.digests())
            while left and not self._must_stop:
                num_missed += not self._copy(left[0])
                left.popleft()
            if not self._must_stop:
                self.tiers.catch_up(self._stride)
        except Exception:  # a fault of the tiers costs blocks, never the worker
            logger.exception("cannot write to the tiers")
        return num_missed + len(left)

    def _copy(self, block: PublishedBlock) -> bool:
        """Copy a block from its page; returns whether the tiers have it."""
        if block.block_hash in self.tiers:
            return True
        if not block.is_in_place(self._lives):
            return False
        data = self._store.read_blocks([block.block_id])
        if not block.is_in_place(self._lives):
            return False
        self.tiers.put(block.block_hash, block.root, data)
        return True

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
        self._note_use(hashes)
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

    def _note_use(self, hashes: BlockHashes) -> None:
        self._used.append(hashes)
        self._num_used += len(hashes)
        while self._num_used > _MAX_USED:
            self._num_used -= len(self._used.popleft())
        self._woken.set()

    async def read(self, landing: Landing, commit: Callable[[int], None]) -> int:
        """See `TierReads.read`."""
        try:
            return await self._reads.read(landing, commit)
        finally:
            self._woken.set()  # blocks that could not be read have left the tiers

    # ── for other workers ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def staging(self) -> pb.SharedMemory | None:
        """See `Offloaded`."""
        return self.serving.staging

    def num_held(self, hashes: BlockHashes, first_block: int) -> int:
        """See `Offloaded`."""
        self._note_use(hashes)
        is_stuck = self._reads.is_stuck or self.serving.is_stuck
        return first_block if is_stuck else self._end_in_tiers(hashes.digests(), first_block)

    @asynccontextmanager
    async def piece(self, wanted: OffloadedBlocks) -> AsyncIterator[OffloadedPiece]:
        """See `Offloaded`."""
        async with self.serving.piece(wanted) as piece:
            if piece.num_blocks < min(len(wanted.hashes), self._stride):
                self._woken.set()  # likewise
            yield piece


def _step_back() -> None:
    """Let other threads go first: a step that shares its cores with a write takes twice as long.

    Not by the most that there is (19): beside steps that have all cores, blocks then left their pages before they were
    copied, and hits of returning agents fell from 88 to 58 %.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _capacity_of(tiers: Tiers) -> int:
    """Return the most blocks, each counted once: the larger tier is written what the smaller one is."""
    return max((counts.capacity for counts in tiers.stats().tiers.values()), default=0)


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

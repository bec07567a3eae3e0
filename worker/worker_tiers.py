"""A worker's tiers at work: published blocks go in as they come, blocks of prompts come back into pages.

*In*: a block is copied soon after it was published, while its page keeps it, so that nothing has to be copied when the
page is given away. The copy counts if the page still holds the block at its end (`engine/published.py`). One
piece at a time is written, and beside a busy engine at most `_MAX_SHARE` of the time. A block that has left its page
before its turn is lost to the tiers, and counted.

*Back*: reading is a pull like that from another worker (`prefix_pull.py`): into reserved pages, verified by the tier,
published piece by piece, in no more time than computing would take.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from common.block_hash import BlockHashes
from common.clock import Clock
from common.config import TiersConfig
from common.ids import BlockHash, BlockId, HashRoot
from common.kv_events import KvEvents
from engine.events import EngineLoad, StepReport
from engine.kv_store import PIECE_BYTES, KvShape, KvStore
from engine.published import PublishedBlock
from engine.steps.landing import Landing
from kv_tiers.tiers import DISK, Tiers, TierSettings
from kv_transfer.transports.transport import to_end
from worker.held_blocks import HeldBlocks

_GIB = 1 << 30
_MAX_SHARE = 0.25
"""Most of the time that is spent on writing while the engine has work."""
_MAX_PAUSE_S = 1.0
_MAX_USED = 1024
_FLUSH_S = 10.0
"""Time at the end for blocks that are not written yet."""


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
        on_read: Callable[[int, float], None],
    ) -> None:
        """`lives`: see `Engine.report_published`. `on_read(bytes, seconds)` is called for each piece that was read."""
        self.tiers = tiers
        self.num_missed = 0
        """Blocks that had left their pages before they could be copied."""
        self._store = store
        self._lives = lives
        self._clock = clock
        self._on_changes = on_changes
        self._on_read = on_read
        self._capacity = _capacity_of(tiers)
        self._held = HeldBlocks()
        self._held.of_tiers(tiers.drain_changes())
        self._offered: deque[PublishedBlock] = deque()
        self._used: deque[list[BlockHash]] = deque(maxlen=_MAX_USED)
        """Blocks of prompts that came since the last piece."""
        self._is_busy = self._is_writing = False
        self._turn = asyncio.Lock()
        """Held while a piece is written, and while blocks are forgotten."""
        self._woken = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    # ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        """Blocks and prompts that are not worked off."""
        return len(self._offered) + len(self._used) + self._is_writing

    @property
    def alarms(self) -> tuple[str, ...]:
        """What is wrong with the tiers now, and what to do. Any thread."""
        return self.tiers.stats().alarms

    def start(self) -> None:
        """Begin to write."""
        self._writing = asyncio.get_running_loop().create_task(self._write_forever(), name="tiers")

    async def aclose(self) -> None:
        """Write what was offered, as far as there is time, and close the tiers."""
        if self._writing is not None:
            self._writing.cancel()
            with suppress(asyncio.CancelledError):
                await self._writing
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    while self.num_waiting:
                        await self._write_piece()
        await to_end(self.tiers.close)

    def take(self, report: StepReport) -> KvEvents:
        """Take note of a step: what was published, and what the pages hold. Returns what routers are told."""
        self._is_busy = report.load.num_running + report.load.num_waiting > 0
        if report.published:
            self._offered.extend(report.published)
            if len(self._offered) > 2 * self._store.num_blocks:
                self._drop_stale()
            self._woken.set()
        return self._held.of_pages(report.kv_events)

    def measured(self, load: EngineLoad) -> EngineLoad:
        """Return a load with how full the tiers are."""
        return replace(load, num_tier_blocks=len(self._held.in_tiers), max_tier_blocks=self._capacity)

    def snapshot(self, of_pages: KvEvents) -> KvEvents:
        """Return all blocks that the worker holds; `of_pages`: those in pages."""
        return self._held.snapshot(of_pages)

    def _drop_stale(self) -> None:
        in_place = [block for block in self._offered if block.is_in_place(self._lives)]
        self.num_missed += len(self._offered) - len(in_place)
        self._offered = deque(in_place)

    async def _write_forever(self) -> None:
        while True:
            await self._woken.wait()
            began_s = self._clock.monotonic()
            await self._write_piece()
            if not self.num_waiting:
                self._woken.clear()
            elif self._is_busy:
                busy_s = self._clock.monotonic() - began_s
                await asyncio.sleep(min(_MAX_PAUSE_S, busy_s * (1 / _MAX_SHARE - 1)))

    async def _write_piece(self) -> None:
        num_most = max(1, PIECE_BYTES // self._store.shape.block_bytes)
        async with self._turn:
            used = [self._used.popleft() for _ in range(len(self._used))]
            piece = [self._offered.popleft() for _ in range(min(num_most, len(self._offered)))]
            self._is_writing = True
            try:
                num_missed = await to_end(self._work_off, used, piece)
                self.num_missed += num_missed
            finally:
                self._is_writing = False
        self._tell_changes()

    def _tell_changes(self) -> None:
        self._capacity = _capacity_of(self.tiers)
        if changes := self.tiers.drain_changes():
            self._on_changes(self._held.of_tiers(changes))

    async def forget(self, root: HashRoot) -> int:
        """Drop a tenant's blocks from all tiers and overwrite them on disk; returns how many there were.

        What has left the pages before does not come in any more: the piece that is being written ends first.
        """
        async with self._turn:
            num_blocks = await to_end(self.tiers.forget, root)
        self._tell_changes()
        return num_blocks

    @property
    def obstacle(self) -> str:
        """Why the disk cannot be reached; empty: it can, or there is none."""
        disk = self.tiers.stats().tiers.get(DISK)
        return "; ".join(self.alarms) if disk is not None and not disk.capacity else ""

    def _work_off(self, used: Sequence[Sequence[BlockHash]], piece: Sequence[PublishedBlock]) -> int:
        """Copy blocks from their pages into the tiers; returns how many had gone. In a thread."""
        for hashes in used:
            self.tiers.touch(hashes)
        num_missed = 0
        for block in piece:
            if block.block_hash in self.tiers:
                continue
            if block.is_in_place(self._lives):
                data = self._store.read_blocks([block.block_id])
                if block.is_in_place(self._lives):
                    self.tiers.put(block.block_hash, block.root, data)
                    continue
            num_missed += 1
        return num_missed

    # ── back ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def num_worth_reading(self, hashes: BlockHashes) -> int:
        """Return how many leading blocks of a prompt are in pages once the tiers are read; 0: no more than now."""
        digests = hashes.digests()
        self._used.append(digests)
        self._woken.set()
        held = self._held
        num_in_pages = bisect_left(digests, 1, key=lambda block_hash: block_hash not in held.in_pages)
        num_blocks = num_in_pages
        while num_blocks < len(digests) and digests[num_blocks] in held.in_tiers:
            num_blocks += 1
        return num_blocks if num_blocks > num_in_pages else 0

    async def read(self, landing: Landing, commit: Callable[[int], None]) -> int:
        """Fill the pages of a landing, in order; `commit(n)` is called when n leading blocks are there.

        Returns how many were read. Ends, even when cancelled, after the last write into the pages.
        """
        hashes, block_ids = landing.hashes.digests(), landing.block_ids()
        first = end = landing.num_cached_blocks
        stride = max(1, PIECE_BYTES // self._store.shape.block_bytes)
        while end < len(hashes):
            piece = slice(end, end + stride)
            began_s = self._clock.monotonic()
            num_read = await to_end(self._fill, hashes[piece], block_ids[piece], landing.root)
            if not num_read:
                break
            self._on_read(num_read * self._store.shape.block_bytes, self._clock.monotonic() - began_s)
            end += num_read
            commit(end)
        return end - first

    def _fill(self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId], root: HashRoot) -> int:
        """Write blocks from the tiers into pages, up to the first that is not there. Returns how many. In a thread."""
        for idx, (block_hash, block_id) in enumerate(zip(hashes, block_ids, strict=True)):
            data = self.tiers.get(block_hash, root)
            if data is None:
                return idx
            self._store.write_blocks([block_id], memoryview(data))
        return len(hashes)


def _capacity_of(tiers: Tiers) -> int:
    return sum(counts.capacity for counts in tiers.stats().tiers.values())


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

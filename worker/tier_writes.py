"""Writes published blocks to a worker's tiers.

A block is copied soon after it was published, while its page keeps it, so that nothing has to be copied when the
page is given away. The copy counts if the page still holds the block at its end (`engine/published.py`). One
piece at a time is written, by a thread of its own, and beside a busy engine at most `_MAX_SHARE` of the time. A block
that has left its page before its turn is lost to the tiers, and counted.
"""

import asyncio
import logging
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from common.block_hash import BlockHashes
from common.clock import Clock
from common.ids import BlockHash
from common.kv_events import KvEvents
from common.structured import end_all
from engine.kv_store import KvStore
from engine.published import PublishedBlock
from kv_tiers.tiers import Tiers, TierStats
from worker.held_blocks import HeldBlocks
from worker.tier_reads import piece_blocks
from worker.tier_threads import TierThreads

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
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


class TierWrites:
    """Writes to the tiers of one worker. Event loop only, but for what runs in a thread. Close with `aclose`."""

    def __init__(
        self,
        tiers: Tiers,
        *,
        store: KvStore,
        lives: "array[int]",
        clock: Clock,
        held: HeldBlocks,
        on_changes: Callable[[KvEvents], None],
    ) -> None:
        """`lives`: see `Engine.report_published`; `held` is brought up to date, and `on_changes` told."""
        self.num_missed = 0
        """Blocks that could not be copied, since they had left their pages or the tiers failed."""
        self.stats = tiers.stats()
        """State of the tiers at their last use. Any thread."""
        self.turn = asyncio.Lock()
        """Held while a piece is written and told of, and while blocks are forgotten."""
        self._tiers = tiers
        self._store = store
        self._lives = lives
        self._clock = clock
        self._held = held
        self._held.in_tiers.update(tiers.drain_changes())  # all that a predecessor has left
        self._on_changes = on_changes
        self._stride = piece_blocks(store.shape)
        self._offered: deque[PublishedBlock] = deque()
        self._used: deque[BlockHashes] = deque()
        """Blocks of prompts that came since the last piece."""
        self._num_used = self._num_behind = 0
        self._is_busy = self._is_writing = False
        self._woken, self._closing = asyncio.Event(), asyncio.Event()
        self._must_stop = False
        """Whether the thread that writes is to end after the block that it is at."""
        self._thread = TierThreads(1, name="tier-write", initializer=_step_back)
        self._writing: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Blocks and prompts that are not worked off."""
        return len(self._offered) + len(self._used) + self._num_behind + self._is_writing

    def start(self) -> None:
        """Begin to write."""
        self._writing = asyncio.get_running_loop().create_task(self._write_until_closed(), name="tiers")

    async def aclose(self) -> None:
        """Write what was offered, as far as there is time. A write that hangs is left behind."""
        self._closing.set()
        self._woken.set()
        if self._writing is not None:
            _done, late = await asyncio.wait([self._writing], timeout=_FLUSH_S)
            self._must_stop = True
            await end_all(list(late))
        self._thread.shutdown()

    def offer(self, published: Sequence[PublishedBlock], *, is_busy: bool) -> None:
        """Take note of blocks that a step has published, and whether there is more to compute."""
        self._is_busy = is_busy
        if published:
            self._offered.extend(published)
            if len(self._offered) > 2 * self._store.num_blocks:
                self._drop_stale(2 * len(published))
            self._woken.set()

    def note_use(self, hashes: BlockHashes) -> None:
        """Take note of a prompt's blocks, which are the most recently used ones."""
        self._used.append(hashes)
        self._num_used += len(hashes)
        while self._num_used > _MAX_USED:
            self._num_used -= len(self._used.popleft())
        self._woken.set()

    def wake(self) -> None:
        """Tell soon what has left the tiers."""
        self._woken.set()

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
        async with self.turn:
            used, self._used, self._num_used = self._used, deque(), 0
            piece = self._next_piece()
            self._is_writing = True
            try:
                self.num_missed += await self.in_thread(self._work_off, used, piece)
                await self.tell_changes()
            finally:
                self._is_writing = False

    async def in_thread(self, work: Callable[..., _Result], *args: object) -> _Result:
        """Run `work` in the thread that writes; a cancellation does not wait for it."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, *args))

    async def tell_changes(self) -> None:
        """Tell what has come to the tiers, or left them. Under `turn`: a later change is told later."""
        changes, self.stats, self._num_behind = await self.in_thread(self._close_books)
        for i in range(0, len(changes), _CHANGES_AT_ONCE):
            if i:
                await asyncio.sleep(_PUBLISH_GAP_S)
            self._on_changes(self._held.of_tiers(dict(changes[i : i + _CHANGES_AT_ONCE])))

    def _close_books(self) -> tuple[Sequence[tuple[BlockHash, bool]], TierStats, int]:
        """Return blocks that came or left since the last call, the state, and the number that the disk is to get."""
        changes = list(self._tiers.drain_changes().items())
        return changes, self._tiers.stats(), self._tiers.num_behind

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
                self._tiers.touch(hashes.digests())
            while left and not self._must_stop:
                num_missed += not self._copy(left[0])
                left.popleft()
            if not self._must_stop:
                self._tiers.catch_up(self._stride)
        except Exception:  # a fault of the tiers costs blocks, never the worker
            logger.exception("cannot write to the tiers")
        return num_missed + len(left)

    def _copy(self, block: PublishedBlock) -> bool:
        """Copy a block from its page; returns whether the tiers have it."""
        if block.block_hash in self._tiers:
            return True
        if not block.is_in_place(self._lives):
            return False
        data = self._store.read_blocks([block.block_id])
        if not block.is_in_place(self._lives):
            return False
        self._tiers.put(block.block_hash, block.root, data)
        return True


def _step_back() -> None:
    """Let other threads go first: a step that shares its cores with a write takes twice as long.

    Not by the most that there is (19): beside steps that have all cores, blocks then left their pages before they were
    copied, and hits of returning agents fell from 88 to 58 %.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)

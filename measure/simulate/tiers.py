"""Tiers of a simulated worker, under the worker's own code: no bytes, but the time in which they are read.

As in the real ones a block is written to every tier, each tier gives up its least recently used blocks, and what only a
slower one has goes into the faster ones when it is read. Writing takes no time. A worker makes one read at a time,
for itself or for another one, which gets the blocks by its transport: no page is used for them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from common.block_hash import BlockHashes
from common.clock import Clock
from common.ids import BlockHash, BlockId
from common.kv_events import KvEvents
from engine.events import StepReport
from engine.steps.landing import Landing
from kv_tiers.tier import TierCounts
from kv_tiers.tiers import Tiers, TierStats
from kv_transfer.offloaded import OffloadedBlocks, OffloadedPiece
from kv_transfer.transports.transport import sealed
from measure.simulate.records import TierShape
from worker.read_gate import ReadGate
from worker.tier_reads import piece_blocks
from worker.tier_serving import NUM_BUFFERS, Buffers
from worker.worker_tiers import WorkerTiers


class SimTierBlocks:
    """Blocks in the tiers of one worker, the fastest tier first: what the worker's code uses of `kv_tiers.Tiers`."""

    def __init__(self, shapes: Sequence[TierShape]) -> None:
        self._tiers: list[tuple[TierShape, OrderedDict[BlockHash, None]]] = [(each, OrderedDict()) for each in shapes]
        self._changed: set[BlockHash] = set()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return any(block_hash in blocks for _shape, blocks in self._tiers)

    def keep(self, hashes: Iterable[BlockHash]) -> None:
        """Write the next blocks of a prompt, tail first: leaves go before parents."""
        for block_hash in reversed(list(hashes)):
            self._put(block_hash, len(self._tiers))

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Make the leading blocks of a prompt the most recently used."""
        for _shape, blocks in self._tiers:
            for block_hash in reversed(hashes):
                if block_hash in blocks:
                    blocks.move_to_end(block_hash)

    def read_s(self, block_hash: BlockHash, num_bytes: int) -> float | None:
        """Return the time to read a block, which goes into the faster tiers; None: it is in none."""
        for idx, (shape, blocks) in enumerate(self._tiers):
            if block_hash in blocks:
                self._put(block_hash, idx)
                return num_bytes / shape.bytes_per_s
        return None

    def drain_changes(self) -> dict[BlockHash, bool]:
        """Return the blocks that came (True) or went (False) since the last call."""
        changed, self._changed = self._changed, set()
        return {block_hash: block_hash in self for block_hash in changed}

    def stats(self) -> TierStats:
        """Return sizes, by the number of the tier."""
        counts = {str(idx): _counts(shape, len(blocks)) for idx, (shape, blocks) in enumerate(self._tiers)}
        return TierStats(tiers=counts, alarms=())

    def _put(self, block_hash: BlockHash, num_tiers: int) -> None:
        was_here = block_hash in self
        for shape, blocks in self._tiers[:num_tiers]:
            if block_hash not in blocks:
                blocks[block_hash] = None
                if len(blocks) > shape.num_blocks and (gone := blocks.popitem(last=False)[0]) not in self:
                    self._changed ^= {gone}
        if not was_here and block_hash in self:
            self._changed ^= {block_hash}


def _counts(shape: TierShape, num_blocks: int) -> TierCounts:
    return TierCounts(
        blocks=num_blocks, capacity=shape.num_blocks, bytes=0, hits=0, misses=0, writes=0, evictions=0, dropped={}
    )


class SimWorkerTiers(WorkerTiers):
    """Writes at once, and reads in the time of the bytes. Event loop only."""

    def __init__(
        self,
        tiers: SimTierBlocks,
        *,
        clock: Clock,
        gate: ReadGate,
        on_changes: Callable[[KvEvents], None],
        **options: Any,
    ) -> None:
        """`options`: further ones of `WorkerTiers`."""
        super().__init__(cast("Tiers", tiers), clock=clock, gate=gate, on_changes=on_changes, **options)
        self._on_changes = on_changes
        self._on_read = gate.note_read
        self._blocks = tiers
        self._now_s: Callable[[], float] = clock.monotonic
        self._free_at_s = 0.0
        """End of the reads under way."""
        self._buffers = Buffers(num_of_peer=NUM_BUFFERS)  # calls have no callers here

    def start(self) -> None:
        """Do nothing: there is nothing to write in the background."""

    async def aclose(self) -> None:
        """Do nothing."""

    def take(self, report: StepReport) -> KvEvents:
        """See `WorkerTiers`."""
        self._blocks.keep(block.block_hash for block in report.published)
        if changes := self._blocks.drain_changes():
            self._on_changes(self._held.of_tiers(changes))
        return self._held.of_pages(report.kv_events)

    async def snapshot(self, of_pages: KvEvents) -> KvEvents:
        """See `WorkerTiers`."""
        return self._held.snapshot(of_pages)

    def num_readable(self, hashes: BlockHashes) -> int:
        """See `WorkerTiers`."""
        self._blocks.touch(hashes.digests())
        return super().num_readable(hashes)

    @property
    def staging(self) -> None:
        """There are no bytes to share."""

    def num_held(self, hashes: BlockHashes, first_block: int) -> int:
        """See `Offloaded`."""
        self._blocks.touch(hashes.digests())
        return super().num_held(hashes, first_block)

    async def read(self, landing: Landing, commit: Callable[[int], None]) -> int:
        """See `WorkerTiers`."""
        hashes, first = landing.hashes.digests(), landing.num_cached_blocks
        end = first
        while end < len(hashes) and (num_blocks := await self._read_piece(hashes[end:])):
            end += num_blocks
            commit(end)
        return end - first

    @asynccontextmanager
    async def piece(self, wanted: OffloadedBlocks) -> AsyncIterator[OffloadedPiece]:
        """See `Offloaded`. Whose pages a message names does not matter where pages have no bytes."""
        buffer = await self._buffers.take(wanted.puller)
        try:
            num_blocks = await self._read_piece(wanted.hashes.digests())
            self.serving.num_served += num_blocks
            messages = [sealed(wanted.first_block, [BlockId(0)] * num_blocks)] if num_blocks else []
            yield OffloadedPiece(num_blocks=num_blocks, messages=messages)
        finally:
            buffer.free()

    async def _read_piece(self, hashes: Sequence[BlockHash]) -> int:
        """Read the first of some blocks; returns how many: 0 when one is not there."""
        block_bytes = self._store.shape.block_bytes
        blocks_s = [self._blocks.read_s(each, block_bytes) for each in hashes[: piece_blocks(self._store.shape)]]
        if None in blocks_s:
            return 0
        read_s = sum(each for each in blocks_s if each is not None)
        self._free_at_s = max(self._free_at_s, self._now_s()) + read_s
        await asyncio.sleep(self._free_at_s - self._now_s())
        self._on_read(len(blocks_s) * block_bytes, read_s)
        return len(blocks_s)

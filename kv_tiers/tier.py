"""One tier: slots over a medium, with the lock that `Tiers` shares, which is never held during I/O."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from common.clock import Clock
from common.ids import BlockHash, HashRoot
from kv_tiers.faults import FaultKind, TierFault
from kv_tiers.health import RETRY_S, SLOW_S
from kv_tiers.media import Medium
from kv_tiers.slots import Slot, Slots

_NOTED_SHARE = 8
"""A use is remembered over a restart once a block's noted place in the order is off by this part of all slots: blocks
that are used all the time are not written all the time."""
_AT_ONCE = 1 << 11
"""Blocks that are touched, or leave the books, at a time, in some 4 ms."""
_YIELD_S = 1e-3
"""Pause between them: a thread that takes the lock again at once is faster than one that has waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """State of one tier, and what has happened in it since the process began."""

    blocks: int
    capacity: int
    """Most blocks."""
    bytes: int
    """Bytes of the blocks, without what is stored beside them."""
    hits: int
    misses: int
    writes: int
    evictions: int
    dropped: Mapping[str, int]
    """Blocks that were dropped or not kept, by kind of fault; `slow` counts reads and writes."""


class Tally:
    """Counters of one tier; they outlive a medium that is opened again. Under the lock."""

    def __init__(self) -> None:
        self.hits = self.misses = self.writes = self.evictions = 0
        self.dropped: Counter[FaultKind] = Counter()

    def counts(self, slots: Slots, block_bytes: int) -> TierCounts:
        """Return the counters and the state of these slots."""
        return TierCounts(
            blocks=len(slots),
            capacity=slots.limit,
            bytes=len(slots) * block_bytes,
            hits=self.hits,
            misses=self.misses,
            writes=self.writes,
            evictions=self.evictions,
            dropped={kind.value: count for kind, count in self.dropped.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a tier shares with the others of its process."""

    lock: threading.Lock
    clock: Clock
    tally: Tally
    on_change: Callable[[BlockHash], None]
    """Called under the lock when a block has come or gone."""
    on_outcome: "Callable[[Tier, TierFault | None], None]"
    """Called without the lock after a read or write, with None when it went well."""


class Tier:
    """Blocks in one medium. Any thread; calls block for their I/O."""

    def __init__(self, medium: Medium, slots: Slots, surroundings: Surroundings) -> None:
        self.slots = slots
        self._medium = medium
        self._lock = surroundings.lock
        self._clock = surroundings.clock
        self._tally = surroundings.tally
        self._on_change = surroundings.on_change
        self._on_outcome = surroundings.on_outcome
        self._readmitted_s = surroundings.clock.monotonic()
        """When slots that were set aside were last freed."""
        self._num_running = 0
        self._is_retired = False

    def put(self, block_hash: BlockHash, root: HashRoot, root_tag: bytes, data: memoryview) -> None:
        """Write a block, unless it is here: then it is used."""
        with self._running() as is_open:
            if not is_open:
                return
            with self._lock:
                is_here = block_hash in self.slots
                slot = None if is_here else self._reserve(block_hash, root_tag)
            if is_here:
                self.touch([block_hash])
            elif slot is not None:
                self._write(slot, root, data)

    def _reserve(self, block_hash: BlockHash, root_tag: bytes) -> Slot | None:
        now_s = self._clock.monotonic()
        if now_s - self._readmitted_s >= RETRY_S:
            self._readmitted_s = now_s
            self.slots.readmit()
        reserved = self.slots.reserve(block_hash, root_tag)
        if reserved is None:
            return None
        slot, evicted = reserved
        if evicted is not None:
            self._tally.evictions += 1
            self._on_change(evicted)
        return slot

    def _write(self, slot: Slot, root: HashRoot, data: memoryview) -> None:
        fault, begun_s = None, self._clock.monotonic()
        try:
            slot.seal = self._medium.write(slot, root, data)
        except TierFault as error:
            fault = error
        with self._lock:
            must_erase = slot.is_leaving
            if fault is not None:
                self._tally.dropped[fault.kind] += 1
                self.slots.abandon(slot, for_space=fault.kind is FaultKind.FULL)
                if fault.kind is FaultKind.FULL:
                    self.slots.shrink()
            elif not self._is_retired:
                self._tally.writes += 1
                if self.slots.publish(slot):
                    self._on_change(slot.block_hash)
        if must_erase:
            self._erase(slot)
        self._end(fault, begun_s)

    def get(self, block_hash: BlockHash, root: HashRoot, root_tag: bytes, *, num_asked: int = 1) -> bytes | None:
        """Return a block of this root; None when it is not here, or not whole: then it is dropped.

        `num_asked`: hits or misses that it counts as; 0 where no request asks.
        """
        with self._running() as is_open:
            with self._lock:
                slot = self.slots.pin(block_hash, root_tag) if is_open else None
                self._tally.misses += num_asked * (slot is None)
            return None if slot is None else self._read(slot, root, num_asked)

    def _read(self, slot: Slot, root: HashRoot, num_asked: int) -> bytes | None:
        data, fault, begun_s = None, None, self._clock.monotonic()
        try:
            data = self._medium.read(slot, root)
        except TierFault as error:
            fault = error
        with self._lock:
            self._tally.hits += num_asked * (fault is None)
            self._tally.misses += num_asked * (fault is not None)
            if fault is not None and self.slots.drop(slot):
                self._tally.dropped[fault.kind] += 1
                self._on_change(slot.block_hash)
        self._unpin(slot)
        self._end(fault, begun_s)
        return data

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Make blocks the most recently used ones; the first of them last."""
        for end in range(len(hashes), 0, -_AT_ONCE):
            self._touch(hashes[max(0, end - _AT_ONCE) : end])
            if end > _AT_ONCE:
                time.sleep(_YIELD_S)

    def _touch(self, hashes: Sequence[BlockHash]) -> None:
        lag = self.slots.num_slots // _NOTED_SHARE
        with self._running() as runs:
            if not runs:
                return
            with self._lock:
                touched = [slot for block_hash in reversed(hashes) if (slot := self.slots.touch(block_hash))]
                behind = [slot for slot in touched if slot.used - slot.noted > lag]
                for slot in behind:
                    slot.noted = slot.used
                    slot.pins += 1
            fault = None
            for slot in behind:
                try:
                    self._medium.note_use(slot)
                except TierFault as error:
                    fault = error
                self._unpin(slot)
        if behind:
            self._on_outcome(self, fault)

    def forget(self, root_tag: bytes) -> set[BlockHash]:
        """Drop and overwrite a tenant's blocks, and return them.

        A block that another thread reads or writes just now is overwritten by that thread. Where one cannot be
        overwritten, all blocks of the tier are removed.
        """
        with self._running() as is_open:
            if not is_open:
                return set()
            with self._lock:
                slots = self.slots.of_root(root_tag)
                for slot in slots:
                    slot.is_forgotten = True
                    if self.slots.drop(slot):
                        self._on_change(slot.block_hash)
                idle = [slot for slot in slots if self.slots.is_idle(slot)] + self.slots.take_unused(root_tag)
            if all(map(self._erase, idle)) and idle:
                self._sync()
        return {slot.block_hash for slot in slots if slot.root_tag == root_tag}

    def retire(self) -> None:
        """Drop all blocks from the books, and close the medium once the last call has ended. Its bytes stay."""
        with self._lock:
            must_close = not self._is_retired and not self._num_running
            self._is_retired = True
        num_left = 1
        while num_left:
            with self._lock:
                for block_hash in self.slots.clear(_AT_ONCE):
                    self._on_change(block_hash)
                num_left = len(self.slots)
            if num_left:
                time.sleep(_YIELD_S)
        if must_close:
            self._medium.close()

    def _unpin(self, slot: Slot) -> None:
        with self._lock:
            must_erase = self.slots.unpin(slot)
        if must_erase:
            self._erase(slot)

    def _erase(self, slot: Slot) -> bool:
        """Overwrite a slot and free it, or set it aside. Returns whether it was overwritten."""
        is_erased = True
        try:
            self._medium.erase(slot)
        except TierFault as fault:
            is_erased = False
            if slot.is_forgotten:
                self._remove(fault)
        with self._lock:
            if is_erased:
                self.slots.free(slot)
            else:
                self.slots.set_aside(slot)
        return is_erased

    def _sync(self) -> None:
        try:
            self._medium.sync()
        except TierFault as fault:
            self._remove(fault)

    def _remove(self, fault: TierFault) -> None:
        """Remove everything, since forgotten blocks cannot be overwritten."""
        reason = f"forgotten blocks could not be overwritten ({fault}), so that all were removed"
        try:
            self._medium.remove()
        except TierFault as error:
            reason = f"forgotten blocks could not be overwritten ({fault}); remove them yourself: {error}"
        self._on_outcome(self, TierFault(FaultKind.VANISHED, reason))

    def _end(self, fault: TierFault | None, begun_s: float) -> None:
        """Report how a read or write ended that began at a time."""
        took_s = self._clock.monotonic() - begun_s
        if fault is None and took_s > SLOW_S:
            fault = TierFault(FaultKind.SLOW, f"a block took {took_s:.1f} s")
            with self._lock:
                self._tally.dropped[fault.kind] += 1
        self._on_outcome(self, fault)

    @contextmanager
    def _running(self) -> Iterator[bool]:
        """Keep the medium open for a call; yields False when the tier has been retired."""
        with self._lock:
            is_open = not self._is_retired
            self._num_running += is_open
        try:
            yield is_open
        finally:
            with self._lock:
                self._num_running -= is_open
                must_close = is_open and self._is_retired and not self._num_running
            if must_close:
                self._medium.close()

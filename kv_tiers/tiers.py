"""The tiers of one process: blocks that left the pages, in host memory and on disk, by content.

Writing goes through to both. Reading asks the faster one first, and what only the disk has goes into host memory again.
A block comes back exactly as it was put, or not at all; `faults.py` names the reasons, which are counted.

Why slots of one size, and no log of segments: slots are evicted in exact order of use, need no compaction and write
each block once. A log would delete whole segments, of blocks that are used and others, or copy the former.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from common.block_hash import HASH_BYTES, ROOT_BYTES
from common.clock import Clock, SystemClock
from common.ids import BlockHash, HashRoot
from common.trust.sealing import root_tag
from kv_tiers import disk
from kv_tiers.faults import TierFault, reason_of
from kv_tiers.files import Files
from kv_tiers.health import Health
from kv_tiers.media import HostMedium
from kv_tiers.slots import Slots
from kv_tiers.tier import Surroundings, Tally, Tier, TierCounts

logger = logging.getLogger(__name__)

HOST = "host"
DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Sizes and place of the tiers, and what their blocks are."""

    host_bytes: int
    """Host memory; 0: no such tier."""
    disk_bytes: int
    """Space on disk; 0: no such tier."""
    path: Path | None
    """Folder of the disk tier, on a local file system."""
    fingerprint: str
    """`KvShape.fingerprint`: weights, dtype and layout."""
    block_bytes: int
    """Bytes of a block in wire form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What `Tiers` holds and has done."""

    tiers: Mapping[str, TierCounts]
    """By name, "host" and "disk"; those that have a size."""
    alarms: tuple[str, ...]
    """What is wrong now, and what to do."""

    @property
    def capacity(self) -> int:
        """Most blocks, each counted once: the larger tier is written what the smaller one is."""
        return max((counts.capacity for counts in self.tiers.values()), default=0)


class Tiers:
    """Verified blocks. Any thread; calls block for their I/O, and one lock keeps the books, never during I/O."""

    def __init__(self, settings: TierSettings, *, files: Files, clock: Clock) -> None:
        self._settings = settings
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._tallies = {HOST: Tally(), DISK: Tally()}
        self._open: dict[str, Tier] = {}
        """Tiers by name, the fastest first."""
        self._host_alarm: str | None = None
        self._health = Health(clock)
        self._is_closed = False
        self._is_opening = False
        self._to_forget: set[bytes] = set()
        """Root tags of blocks that may still be on a disk that is off."""
        self._behind: dict[BlockHash, HashRoot] = {}
        """Blocks in host memory that the disk did not take. It takes the roots to seal them, which stay until then."""
        self._geometry = disk.Geometry.of(
            disk_bytes=settings.disk_bytes, block_bytes=settings.block_bytes, fingerprint=settings.fingerprint
        )
        self._num_held = 0
        """Blocks that are in some tier."""
        self._changed: set[BlockHash] = set()
        """Blocks that are in some tier now and were in none at the last drain, or the other way round."""

    @classmethod
    def open(cls, settings: TierSettings, *, files: Files | None = None, clock: Clock | None = None) -> "Tiers":
        """Return the tiers, with the blocks that a predecessor left on disk. What cannot be used is an alarm."""
        tiers = cls(settings, files=files or Files(), clock=clock or SystemClock())
        tiers._open_host()
        if settings.path is not None and settings.disk_bytes:
            tiers._open_disk(settings.path)
        return tiers

    def __contains__(self, block_hash: BlockHash) -> bool:
        with self._lock:
            return self._holds(block_hash)

    def __len__(self) -> int:
        return self._num_held

    def put(self, block_hash: BlockHash, root: HashRoot, data: memoryview) -> None:
        """Keep a block in every tier; one that is there already is used. Raises ValueError for bytes of a wrong size.

        Put a prompt's blocks tail first, or `touch` them afterwards: then leaves go before parents.
        """
        data = data.cast("B")
        if (len(block_hash), len(root), len(data)) != (HASH_BYTES, ROOT_BYTES, self._settings.block_bytes):
            raise ValueError(f"cannot put a block of {len(data)} bytes: it has {self._settings.block_bytes}")
        self._retry_disk()
        tag = root_tag(root)
        for tier in self._all():
            tier.put(block_hash, root, tag, data)
        with self._lock:
            if self._settings.disk_bytes and self._is_in(HOST, block_hash) and not self._is_in(DISK, block_hash):
                self._behind[block_hash] = root
            else:
                self._behind.pop(block_hash, None)

    @property
    def num_behind(self) -> int:
        """Blocks that `catch_up` would write now."""
        with self._lock:
            disk_tier = self._open.get(DISK)
            return len(self._behind) if disk_tier is not None and not disk_tier.slots.is_short else 0

    def catch_up(self, num_blocks: int) -> None:
        """Write up to so many blocks to disk that only host memory took while the disk was off. Not beside `forget`."""
        with self._lock:
            host_tier, disk_tier = self._open.get(HOST), self._open.get(DISK)
            piece = list(islice(self._behind.items(), num_blocks))
        if host_tier is None or disk_tier is None or disk_tier.slots.is_short:
            return
        for block_hash, root in piece:
            tag = root_tag(root)
            data = host_tier.get(block_hash, root, tag, num_asked=0)
            if data is not None:
                disk_tier.put(block_hash, root, tag, memoryview(data))
            with self._lock:
                if data is not None and not self._is_in(DISK, block_hash):
                    return  # it fails again
                self._behind.pop(block_hash, None)

    def get(self, block_hash: BlockHash, root: HashRoot) -> bytes | memoryview | None:
        """Return a block as it was put under this root; None when no tier has it whole. Changes no order: `touch`."""
        tag = root_tag(root)
        missed: list[Tier] = []
        for tier in self._all():
            data = tier.get(block_hash, root, tag)
            if data is not None:
                for faster in missed:
                    faster.put(block_hash, root, tag, memoryview(data))
                return data
            missed.append(tier)
        return None

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Make the leading blocks of a prompt the most recently used, tail first: leaves go before parents."""
        for tier in self._all():
            tier.touch(hashes)

    def forget(self, root: HashRoot) -> int:
        """Drop a tenant's blocks from every tier and overwrite them; returns how many blocks there were."""
        tag = root_tag(root)
        with self._lock:
            self._to_forget.add(tag)
        hashes = set().union(*(tier.forget(tag) for tier in self._all()))
        if self._settings.path is not None:
            hashes |= disk.forget_unused(self._settings.path, self._geometry, self._files, tag)
        with self._lock:
            if DISK in self._open or not self._settings.disk_bytes:
                self._to_forget.discard(tag)
        return len(hashes)

    def drain_changes(self) -> dict[BlockHash, bool]:
        """Return the blocks that came (True) or went (False) since the last call; at first, all that are there."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return {block_hash: self._holds(block_hash) for block_hash in changed}

    def snapshot(self) -> list[BlockHash]:
        """Return the blocks that are in some tier."""
        with self._lock:
            return list(dict.fromkeys(h for tier in self._open.values() for h in tier.slots.hashes()))

    def stats(self) -> TierStats:
        """Return sizes, counters and alarms."""
        sizes = {HOST: self._settings.host_bytes, DISK: self._settings.disk_bytes}
        with self._lock:
            counts = {}
            for name in (name for name, size in sizes.items() if size):
                slots = self._open[name].slots if name in self._open else Slots(0)
                counts[name] = self._tallies[name].counts(slots, self._settings.block_bytes)
            alarms = tuple(alarm for alarm in (self._host_alarm, self._health.alarm) if alarm is not None)
        return TierStats(tiers=counts, alarms=alarms)

    def close(self) -> None:
        """Give back memory and files; blocks on disk stay there. Later calls find nothing."""
        with self._lock:
            self._is_closed = True
        for tier in self._all():
            tier.retire()

    def _all(self) -> list[Tier]:
        with self._lock:
            return list(self._open.values())

    def _is_in(self, name: str, block_hash: BlockHash) -> bool:
        tier = self._open.get(name)
        return tier is not None and block_hash in tier.slots

    def _holds(self, block_hash: BlockHash) -> bool:
        return any(block_hash in tier.slots for tier in self._open.values())

    def _flip(self, name: str, block_hash: BlockHash) -> None:
        """Note that a block has come to a tier, or left it. Under the lock."""
        if name == HOST and self._behind and not self._is_in(HOST, block_hash):
            self._behind.pop(block_hash, None)
        if any(block_hash in tier.slots for other, tier in self._open.items() if other != name):
            return
        self._num_held += 1 if self._holds(block_hash) else -1
        self._changed ^= {block_hash}

    def _surroundings(self, name: str) -> Surroundings:
        return Surroundings(
            lock=self._lock,
            clock=self._clock,
            tally=self._tallies[name],
            on_change=partial(self._flip, name),
            on_outcome=self._note_outcome,
        )

    def _open_host(self) -> None:
        num_slots = self._settings.host_bytes // self._settings.block_bytes
        if not num_slots:
            return
        try:
            medium = HostMedium(num_slots, self._settings.block_bytes)
        except (OSError, ValueError, OverflowError) as error:
            size = f"{self._settings.host_bytes / (1 << 30):g} GiB"
            self._host_alarm = f"cannot have a host tier of {size}: {reason_of(error)}; lower tiers.host_gib"
            logger.warning("%s", self._host_alarm)
            return
        self._open[HOST] = Tier(medium, Slots(num_slots), self._surroundings(HOST))

    def _open_disk(self, path: Path) -> None:
        """Open the disk tier, or raise the alarm."""
        try:
            store = disk.open_store(path, self._geometry, self._files)
        except (OSError, TierFault) as error:
            with self._lock:
                self._health.turn_off(error)
            return
        tier = Tier(store.medium, Slots(self._geometry.num_slots), self._surroundings(DISK))
        forgotten: set[bytes] = set()
        while late := self._install(tier, store, forgotten):
            try:
                store.forget(late)
            except TierFault as error:
                tier.retire()
                with self._lock:
                    self._health.turn_off(error)
                return
            forgotten |= late

    def _install(self, tier: Tier, store: disk.Store, forgotten: set[bytes]) -> set[bytes]:
        """Begin to use a tier, unless blocks of more roots were to be forgotten meanwhile, whose tags are returned."""
        with self._lock:
            late = self._to_forget - forgotten
            if late:
                return late
            tier.slots.restore(store.slots)
            self._tallies[DISK].dropped += store.dropped
            self._health.clear()
            self._to_forget.clear()
            self._open[DISK] = tier
            for slot in store.slots:
                self._flip(DISK, slot.block_hash)
            is_closed = self._is_closed
        if is_closed:
            tier.retire()
        return set()

    def _retry_disk(self) -> None:
        """Try again what failed a while ago: a disk that was off, or one that was full."""
        with self._lock:
            path = self._settings.path
            is_busy = self._is_closed or self._is_opening
            if path is None or is_busy or not self._health.begin_retry():
                return
            tier = self._open.get(DISK)
            if tier is not None:
                tier.slots.limit = tier.slots.num_slots
                self._health.clear()
                return
            self._is_opening = True
        try:
            self._open_disk(path)
        finally:
            self._is_opening = False

    def _note_outcome(self, tier: Tier, fault: TierFault | None) -> None:
        """Turn the disk tier off when it is not worth asking. Its blocks stay where they are."""
        with self._lock:
            must_end = self._open.get(DISK) is tier and self._health.note(fault)
        if must_end:
            assert fault is not None
            tier.retire()
            with self._lock:
                if self._open.get(DISK) is tier:
                    del self._open[DISK]
                    self._health.turn_off(fault)

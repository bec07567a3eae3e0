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
from pathlib import Path

from common.block_hash import HASH_BYTES, ROOT_BYTES
from common.ids import BlockHash, HashRoot
from common.trust.sealing import root_tag
from kv_tiers.media import HostMedium
from kv_tiers.slots import Slots
from kv_tiers.tier import Tally, Tier, TierCounts

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


class Tiers:
    """Verified blocks. Any thread; calls block for their I/O, and one lock keeps the books, never during I/O."""

    def __init__(self, settings: TierSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._tallies = {HOST: Tally(), DISK: Tally()}
        self._open: dict[str, Tier] = {}
        """Tiers by name, the fastest first."""
        self._alarms: dict[str, str] = {}
        self._changed: set[BlockHash] = set()
        """Blocks that are in some tier now and were in none at the last drain, or the other way round."""

    @classmethod
    def open(cls, settings: TierSettings) -> "Tiers":
        """Return the tiers, with the blocks that a predecessor left on disk. What cannot be used is an alarm."""
        tiers = cls(settings)
        tiers._open_host()
        return tiers

    def __contains__(self, block_hash: BlockHash) -> bool:
        with self._lock:
            return self._holds(block_hash)

    def __len__(self) -> int:
        return len(self.snapshot())

    def put(self, block_hash: BlockHash, root: HashRoot, data: memoryview) -> None:
        """Keep a block in every tier; one that is there already is used. Raises ValueError for bytes of a wrong size.

        Put a prompt's blocks tail first, or `touch` them afterwards: then leaves go before parents.
        """
        data = data.cast("B")
        if (len(block_hash), len(root), len(data)) != (HASH_BYTES, ROOT_BYTES, self._settings.block_bytes):
            raise ValueError(f"cannot put a block of {len(data)} bytes: it has {self._settings.block_bytes}")
        tag = root_tag(root)
        for tier in self._all():
            tier.put(block_hash, root, tag, data)

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
            hashes = {slot.block_hash for tier in self._open.values() for slot in tier.slots.of_root(tag)}
        for tier in self._all():
            tier.forget(tag)
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
        with self._lock:
            counts = {name: tier.counts(self._settings.block_bytes) for name, tier in self._open.items()}
            return TierStats(tiers=counts, alarms=tuple(self._alarms.values()))

    def close(self) -> None:
        """Give back memory and files; blocks on disk stay there. Later calls find nothing."""
        for tier in self._all():
            tier.retire()

    def _all(self) -> list[Tier]:
        with self._lock:
            return list(self._open.values())

    def _holds(self, block_hash: BlockHash) -> bool:
        return any(block_hash in tier.slots for tier in self._open.values())

    def _flip(self, name: str, block_hash: BlockHash) -> None:
        """Note that a block has come to a tier, or left it. Under the lock."""
        if not any(block_hash in tier.slots for other, tier in self._open.items() if other != name):
            self._changed ^= {block_hash}

    def _open_host(self) -> None:
        num_slots = self._settings.host_bytes // self._settings.block_bytes
        if not num_slots:
            return
        try:
            medium = HostMedium(num_slots, self._settings.block_bytes)
        except (OSError, ValueError, OverflowError) as error:
            self._alarms[HOST] = f"cannot have a host tier of {self._settings.host_bytes} bytes: {error}"
            logger.warning("%s", self._alarms[HOST])
            return
        self._open[HOST] = Tier(
            medium, Slots(num_slots), self._tallies[HOST], lock=self._lock, on_change=partial(self._flip, HOST)
        )

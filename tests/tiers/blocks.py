"""Small blocks, and tiers that hold some."""

from collections.abc import Iterable
from pathlib import Path

from common.ids import BlockHash, HashRoot
from kv_tiers.files import Files
from kv_tiers.records import RECORD_BYTES
from kv_tiers.tiers import Tiers, TierSettings
from tests.clock import ManualClock

BLOCK_BYTES = 64
SLOT_BYTES = 4096
ROOT, OTHER = HashRoot(b"a" * 32), HashRoot(b"b" * 32)


def hash_of(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(16, "little"))


def data_of(i: int) -> memoryview:
    return memoryview(i.to_bytes(8, "little") * (BLOCK_BYTES // 8))


def settings(host: int = 0, disk: int = 0, path: Path | None = None, fingerprint: str = "f") -> TierSettings:
    """Return settings for tiers of so many blocks."""
    return TierSettings(
        host_bytes=host * BLOCK_BYTES,
        disk_bytes=disk * (SLOT_BYTES + RECORD_BYTES),
        path=path,
        fingerprint=fingerprint,
        block_bytes=BLOCK_BYTES,
    )


def on_disk(path: Path, num_blocks: int = 4, files: Files | None = None, clock: ManualClock | None = None) -> Tiers:
    """Open a disk tier of so many blocks."""
    return Tiers.open(settings(disk=num_blocks, path=path), files=files, clock=clock)


def fill(tiers: Tiers, *numbers: int, root: HashRoot = ROOT) -> None:
    for i in numbers:
        tiers.put(hash_of(i), root, data_of(i))


def held(tiers: Tiers) -> set[int]:
    return {int.from_bytes(block_hash, "little") for block_hash in tiers.snapshot()}


def readable(tiers: Tiers, numbers: Iterable[int], root: HashRoot = ROOT) -> set[int]:
    """Return which of the blocks come back, having checked their bytes."""
    got = {i: tiers.get(hash_of(i), root) for i in numbers}
    assert all(data == data_of(i) for i, data in got.items() if data is not None)
    return {i for i, data in got.items() if data is not None}

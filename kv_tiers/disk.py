"""The disk as a medium: sealed slots in one sparse file, and their records in another.

A slot's bytes begin at a multiple of a page, so that writing them reads nothing; nonce and tag are in the record.
"""

from collections import Counter
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from common.ids import BlockHash, HashRoot
from common.trust.sealing import NONCE_BYTES, TAG_BYTES, seal, unseal
from kv_tiers import records
from kv_tiers.faults import FaultKind, TierFault
from kv_tiers.files import Files, fault_of, read_whole, write_whole
from kv_tiers.folder import Folder, claim, remove_others, store_key, unused
from kv_tiers.media import Medium
from kv_tiers.records import EMPTY, FORMAT_VERSION, RECORD_BYTES, State
from kv_tiers.slots import Slot

_PAGE_BYTES = 4096
_RECORDS_AT_ONCE = 8192
_NO_SEAL = bytes(NONCE_BYTES + TAG_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Places of slots in the files."""

    num_slots: int
    block_bytes: int
    key: bytes
    """Key of the store."""
    context: bytes
    """What every block is sealed with besides its hash."""

    @classmethod
    def of(cls, *, disk_bytes: int, block_bytes: int, fingerprint: str) -> "Geometry":
        """Return as many slots as fit."""
        key = store_key(fingerprint, block_bytes)
        num_slots = disk_bytes // (_pages(block_bytes) + RECORD_BYTES)
        context = b"kvrelay-tier" + FORMAT_VERSION.to_bytes(2, "little") + fingerprint.encode()
        return cls(num_slots=num_slots, block_bytes=block_bytes, key=key, context=context)

    def offset(self, number: int) -> int:
        """Return where a slot's bytes begin."""
        return number * _pages(self.block_bytes)


class DiskMedium(Medium):
    """Slots in a locked folder."""

    def __init__(self, folder: Folder, geometry: Geometry, files: Files) -> None:
        self._folder = folder
        self._geometry = geometry
        self._files = files
        self._spare: list[bytearray] = []
        """Buffers of reads that have ended. Freed, they would go back to the system, which costs more than reading."""

    def scan(self) -> tuple[list[Slot], Counter[FaultKind]]:
        """Return the blocks that a predecessor left, the least recently used first, and what was dropped, by kind.

        Clears the records of what was dropped, and gives both files their size. Raises TierFault and OSError.
        """
        geometry = self._geometry
        end_of_blocks = self._files.size(self._folder.blocks)
        self._files.resize(self._folder.index, geometry.num_slots * RECORD_BYTES)
        self._files.resize(self._folder.blocks, geometry.offset(geometry.num_slots))
        dropped: Counter[FaultKind] = Counter()
        found: dict[BlockHash, Slot] = {}
        for number, record in self._records():
            slot = records.unpack(record, number, key=geometry.key)
            if isinstance(slot, Slot) and geometry.offset(number) + geometry.block_bytes > end_of_blocks:
                slot = FaultKind.TRUNCATED
            if slot is FaultKind.TORN:
                self._write_bytes(number, bytes(geometry.block_bytes))
            if isinstance(slot, FaultKind):
                dropped[slot] += 1
                self._write_record(number, EMPTY)
            elif slot is not None:
                older = found.get(slot.block_hash)
                if older is not None:
                    older, slot = sorted((older, slot), key=lambda each: each.used)
                    dropped[FaultKind.DUPLICATE] += 1
                    self._write_record(older.number, EMPTY)
                found[slot.block_hash] = slot
        return sorted(found.values(), key=lambda slot: slot.used), dropped

    def write(self, slot: Slot, root: HashRoot, data: memoryview) -> bytes:
        """See `Medium`."""
        self._folder.check()
        sealed = seal(data, root=root, context=self._context(slot))
        self._write_record(slot.number, records.pack(slot, _NO_SEAL, State.WRITING, key=self._geometry.key))
        self._write_bytes(slot.number, sealed.ciphertext)
        self._write_record(slot.number, records.pack(slot, sealed.seal, State.WHOLE, key=self._geometry.key))
        return sealed.seal

    def read(self, slot: Slot, root: HashRoot) -> bytes:
        """See `Medium`."""
        try:
            whole = self._spare.pop()
        except IndexError:
            whole = bytearray(self._geometry.block_bytes + TAG_BYTES)
        try:
            sealed = memoryview(whole)[:-TAG_BYTES]
            read_whole(self._files, self._folder.blocks, sealed, self._geometry.offset(slot.number))
            whole[-TAG_BYTES:] = slot.seal[NONCE_BYTES:]
            data = unseal(whole, slot.seal[:NONCE_BYTES], root=root, context=self._context(slot))
        finally:
            self._spare.append(whole)
        if data is None:
            raise TierFault(FaultKind.FLIPPED, f"slot {slot.number} in {self._folder.path} does not hold what was put")
        return data

    def note_use(self, slot: Slot) -> None:
        """See `Medium`."""
        self._write_record(slot.number, records.pack(slot, slot.seal, State.WHOLE, key=self._geometry.key))

    def erase(self, slot: Slot) -> None:
        """See `Medium`. The record goes last: a process that ends before leaves a torn block to its successor."""
        self._write_record(slot.number, records.pack(slot, _NO_SEAL, State.WRITING, key=self._geometry.key))
        self._write_bytes(slot.number, bytes(self._geometry.block_bytes))
        self._write_record(slot.number, EMPTY)

    def sync(self) -> None:
        """See `Medium`."""
        try:
            self._files.sync(self._folder.blocks)
            self._files.sync(self._folder.index)
        except OSError as error:
            raise fault_of(error, "sync") from error

    def remove(self) -> None:
        """See `Medium`."""
        try:
            self._folder.remove()
        except OSError as error:
            raise fault_of(error, f"remove {self._folder.path}") from error

    def close(self) -> None:
        """See `Medium`."""
        self._folder.close()

    def _records(self) -> Iterator[tuple[int, memoryview]]:
        for first in range(0, self._geometry.num_slots, _RECORDS_AT_ONCE):
            count = min(_RECORDS_AT_ONCE, self._geometry.num_slots - first)
            piece = memoryview(bytearray(count * RECORD_BYTES))
            read_whole(self._files, self._folder.index, piece, first * RECORD_BYTES)
            for i in range(count):
                yield first + i, piece[i * RECORD_BYTES : (i + 1) * RECORD_BYTES]

    def _context(self, slot: Slot) -> bytes:
        return self._geometry.context + slot.block_hash

    def _write_record(self, number: int, record: bytes) -> None:
        write_whole(self._files, self._folder.index, memoryview(record), number * RECORD_BYTES)

    def _write_bytes(self, number: int, data: bytes | memoryview) -> None:
        write_whole(self._files, self._folder.blocks, memoryview(data), self._geometry.offset(number))


@dataclass(slots=True, kw_only=True)
class Store:
    """A folder that was opened, and what it holds."""

    medium: DiskMedium
    slots: list[Slot]
    """The least recently used first."""
    dropped: Counter[FaultKind]

    def forget(self, root_tags: Set[bytes]) -> set[BlockHash]:
        """Overwrite the blocks of some roots, or remove all where that fails, and return them. Raises TierFault."""
        ours = [slot for slot in self.slots if slot.root_tag in root_tags]
        self.slots = [slot for slot in self.slots if slot.root_tag not in root_tags]
        try:
            for slot in ours:
                self.medium.erase(slot)
            if ours:
                self.medium.sync()
        except TierFault:
            self.medium.remove()
            raise
        return {slot.block_hash for slot in ours}


def open_store(path: Path, geometry: Geometry, files: Files) -> Store:
    """Open the first folder of a store that no process uses, and remove stores of other kinds.

    Raises OSError and TierFault.
    """
    if not geometry.num_slots:
        raise TierFault(FaultKind.FULL, f"tiers.disk_gib is less than a block of {geometry.block_bytes} bytes")
    folder = claim(path, geometry.key, files)
    medium = DiskMedium(folder, geometry, files)
    try:
        slots, dropped = medium.scan()
        num_stale = remove_others(path, geometry.key, files)
    except BaseException:
        folder.close()
        raise
    if num_stale:
        dropped[FaultKind.STALE] += num_stale
    return Store(medium=medium, slots=slots, dropped=dropped)


def forget_unused(path: Path, geometry: Geometry, files: Files, root_tag: bytes) -> set[BlockHash]:
    """Overwrite a tenant's blocks in the folders of a store that no process uses, and return them."""
    hashes: set[BlockHash] = set()
    for folder in unused(path, geometry.key, files):
        with suppress(OSError, TierFault):
            num_slots = files.size(folder.index) // RECORD_BYTES
            medium = DiskMedium(folder, replace(geometry, num_slots=num_slots), files)
            slots, dropped = medium.scan()
            hashes |= Store(medium=medium, slots=slots, dropped=dropped).forget({root_tag})
    return hashes


def _pages(num_bytes: int) -> int:
    """Return bytes rounded up to whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES

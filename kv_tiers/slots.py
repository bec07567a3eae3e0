"""The books of one tier: which block is in which slot, and which one goes next. No I/O, no lock: its tier has both.

A *slot* is the place of one block in a medium; all are equally large. A slot is in exactly one state:

    free ──reserve──> writing ──publish──> held ──reserve for another block──> writing
      ^                  │                   │
      └───── free ────── leaving <── drop ───┘

A held slot may be *pinned* by threads that read it: it is not evicted then. A slot that is *leaving* keeps its place
until its bytes are overwritten; a pinned one, until its last reader has left. One that the medium could not overwrite
is not free but *set aside* for a while; the books say whose bytes may still be there.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from common.block_hash import HASH_BYTES
from common.ids import BlockHash

_NO_HASH = BlockHash(bytes(HASH_BYTES))


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One block in its place."""

    number: int
    block_hash: BlockHash
    root_tag: bytes
    """Names the tenant without revealing it; see `common.trust.sealing`."""
    earlier: frozenset[bytes] = frozenset()
    """Root tags of blocks that had its place before and whose bytes may be there until this one is written."""
    seal: bytes = b""
    """What the medium needs to verify the bytes."""
    used: int = 0
    """Sequence number of the latest use."""
    noted: int = 0
    """Sequence number that the medium remembers."""
    pins: int = 0
    is_leaving: bool = False
    is_forgotten: bool = False
    """Whether its bytes must not stay, whatever it takes."""


class Slots:
    """Slots of one tier, in exact order of use."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.limit = num_slots
        """Most blocks at a time; lower than `num_slots` while the file system is full."""
        self._held: OrderedDict[BlockHash, Slot] = OrderedDict()
        """The least recently used block first."""
        self._writing: dict[BlockHash, Slot] = {}
        self._freed: list[int] = []
        """Slots that were used before: their place in the file system is allocated."""
        self._aside: dict[int, frozenset[bytes]] = {}
        """Slots that could not be overwritten, by number, and root tags of the blocks whose bytes may be there."""
        self._unclean: dict[int, frozenset[bytes]] = {}
        """The same of free slots: what ailed them may be over, or there was no space."""
        self._num_begun = 0
        """Slots below this number were used before."""
        self._clock = 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_short(self) -> bool:
        """Whether there is no space for all slots now."""
        return self.limit < self.num_slots

    def hashes(self) -> list[BlockHash]:
        """Return the blocks held, the least recently used one first."""
        return list(self._held)

    def restore(self, slots: Sequence[Slot]) -> None:
        """Take over what a predecessor left, the least recently used first. Only while there is nothing yet."""
        for slot in slots:
            self._held[slot.block_hash] = slot
            self._clock = max(self._clock, slot.used)
        taken = {slot.number for slot in slots}
        self._num_begun = max(taken, default=-1) + 1
        self._freed = [number for number in range(self._num_begun) if number not in taken]

    def reserve(self, block_hash: BlockHash, root_tag: bytes) -> tuple[Slot, BlockHash | None] | None:
        """Return a slot to write a block into, and the block that was evicted for it.

        Returns None when the block is written by another thread, or all slots are written or pinned.
        """
        if block_hash in self._writing:
            return None
        number, evicted = self._room()
        if number is None:
            return None
        self._clock += 1
        slot = Slot(number=number, block_hash=block_hash, root_tag=root_tag, used=self._clock, noted=self._clock)
        if evicted is None:
            slot.earlier = self._unclean.pop(number, frozenset()) or self._aside.pop(number, frozenset())
        else:
            slot.earlier = frozenset({evicted.root_tag})
        self._writing[block_hash] = slot
        return slot, None if evicted is None else evicted.block_hash

    def _room(self) -> tuple[int | None, Slot | None]:
        has_room = len(self._held) + len(self._writing) < self.limit
        if has_room:
            if self._unclean:
                return next(iter(self._unclean)), None
            if self._freed:
                return self._freed.pop(), None
            if self._num_begun < self.num_slots:
                self._num_begun += 1
                return self._num_begun - 1, None
        for block_hash, slot in self._held.items():
            if not slot.pins:
                del self._held[block_hash]
                return slot.number, slot
        return next(iter(self._aside), None) if has_room else None, None

    def publish(self, slot: Slot) -> bool:
        """Hold a slot that is written. Returns False when it is to leave: it was dropped meanwhile."""
        del self._writing[slot.block_hash]
        slot.earlier = frozenset()
        if not slot.is_leaving:
            self._held[slot.block_hash] = slot
        return not slot.is_leaving

    def abandon(self, slot: Slot, *, for_space: bool) -> None:
        """End a write that failed, perhaps for want of space, which is no fault of the slot, unless it is to leave."""
        del self._writing[slot.block_hash]
        if slot.is_leaving:
            return
        if not for_space:
            self.set_aside(slot)
        elif slot.earlier:
            self._unclean[slot.number] = slot.earlier
        else:
            self.free(slot)

    def shrink(self) -> None:
        """Hold no more blocks than now, since there is no space for another one."""
        self.limit = len(self._held) + len(self._writing)

    def pin(self, block_hash: BlockHash, root_tag: bytes) -> Slot | None:
        """Return the slot of a tenant's block, to be read and then unpinned; None when there is none."""
        slot = self._held.get(block_hash)
        if slot is None or slot.root_tag != root_tag:
            return None
        slot.pins += 1
        return slot

    def unpin(self, slot: Slot) -> bool:
        """End a read. Returns True when the slot is leaving and this was its last reader, who overwrites it."""
        slot.pins -= 1
        return slot.is_leaving and not slot.pins

    def touch(self, block_hash: BlockHash) -> Slot | None:
        """Make a block the most recently used one. Returns its slot, or None."""
        slot = self._held.get(block_hash)
        if slot is not None:
            self._clock += 1
            slot.used = self._clock
            self._held.move_to_end(block_hash)
        return slot

    def drop(self, slot: Slot) -> bool:
        """Let a block go. Returns whether it was held until now.

        Its bytes are overwritten by its writer, by its last reader or, where it `is_idle`, by the caller.
        """
        slot.is_leaving = True
        if self._held.get(slot.block_hash) is not slot:
            return False
        del self._held[slot.block_hash]
        return True

    def is_idle(self, slot: Slot) -> bool:
        """Return whether no thread reads or writes a slot."""
        return not slot.pins and self._writing.get(slot.block_hash) is not slot

    def of_root(self, root_tag: bytes) -> list[Slot]:
        """Return the slots that have a tenant's block, or may still have one, and are in use."""
        held = [slot for slot in self._held.values() if slot.root_tag == root_tag]
        writing = self._writing.values()
        return held + [slot for slot in writing if slot.root_tag == root_tag or root_tag in slot.earlier]

    def take_unused(self, root_tag: bytes) -> list[Slot]:
        """Return the slots not in use that may have a tenant's bytes, for the caller to overwrite; they are leaving."""
        return [
            Slot(
                number=number,
                block_hash=_NO_HASH,
                root_tag=root_tag,
                earlier=unused.pop(number),
                is_leaving=True,
                is_forgotten=True,
            )
            for unused in (self._aside, self._unclean)
            for number in [number for number, tags in unused.items() if root_tag in tags]
        ]

    def free(self, slot: Slot) -> None:
        """Let a slot that has left be used again."""
        self._freed.append(slot.number)

    def set_aside(self, slot: Slot) -> None:
        """Let a slot that could not be overwritten be used after all others, until `readmit`."""
        self._aside[slot.number] = slot.earlier | {slot.root_tag}

    def readmit(self) -> None:
        """Free the slots that were set aside."""
        self._unclean |= self._aside
        self._aside = {}

    def clear(self, most: int) -> list[BlockHash]:
        """Hold so many blocks less, and return them; slots stay as they are."""
        return [self._held.popitem()[0] for _ in range(min(most, len(self._held)))]

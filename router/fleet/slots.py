"""The bits of workers in the values of the prefix index.

A worker has a slot, or a pair of them when its model has window pages: the second one says for which blocks it has
such a page. Pairs stay pairs. A worker that has offloaded a block gets one more slot, of its own, for the blocks that
are in its tiers only.
"""

from common.ids import WorkerId
from engine.window import BlockWindow
from router.fleet.prefix_groups import slot_bit


class Slots:
    """Slots by worker. A slot that is given back is not used before `free` says that no value has its bits any more."""

    def __init__(self) -> None:
        self.by_worker: dict[WorkerId, int] = {}
        self.owners: list[WorkerId | None] = []
        """Owner of each slot, None for second ones. Replaced, never changed, because matches keep a reference."""
        self.window_of: dict[int, BlockWindow] = {}
        """Window of the present or last owner, by the first slot of each pair."""
        self.with_window: dict[BlockWindow, int] = {}
        """Bits of the first slots of pairs that have owners, by the window."""
        self.tier_of: dict[int, int] = {}
        """Slot for the blocks that are in tiers only, by the first slot of its worker."""
        self.holders = 0
        """Bits of all slots that have owners."""
        self.live = 0
        """These, and the bits of their window pages and tiers."""
        self._free: list[int] = []
        self._free_pairs: list[int] = []

    def of(self, worker_id: WorkerId, window: BlockWindow | None = None) -> int:
        """Return the slot of a worker, which gets one, or a pair if it has a window."""
        slot = self.by_worker.get(worker_id)
        if slot is None:
            free = self._free if window is None else self._free_pairs
            slot = free.pop() if free else len(self.owners)
            self.by_worker[worker_id] = slot
            if window is not None:
                self.window_of[slot] = window
                self.with_window[window] = self.with_window.get(window, 0) | slot_bit(slot)
            self._own(slot, worker_id)
            self.holders |= slot_bit(slot)
            self.live |= self.bits(slot)
        return slot

    def tier(self, slot: int) -> int:
        """Return the slot for the blocks that are in the tiers only of a worker, which gets one."""
        tier = self.tier_of.get(slot)
        if tier is None:
            tier = self.tier_of[slot] = self._free.pop() if self._free else len(self.owners)
            self._own(tier, None)
            self.live |= slot_bit(tier)
        return tier

    def give_back(self, worker_id: WorkerId) -> tuple[int, ...]:
        """Return what is to be freed of the worker: its slot, or the first one of its pair, and that of its tiers."""
        slot = self.by_worker.pop(worker_id, None)
        if slot is None:
            return ()
        self._own(slot, None)
        self.holders &= ~slot_bit(slot)
        self.live &= ~self.bits(slot)
        if (window := self.window_of.get(slot)) is not None:
            self.with_window[window] &= ~slot_bit(slot)
            if not self.with_window[window]:
                del self.with_window[window]
        tier = self.tier_of.pop(slot, None)
        return (slot,) if tier is None else (slot, tier)

    def free(self, slot: int) -> None:
        """Let another worker have a slot that was given back, or a pair by its first one."""
        (self._free_pairs if slot in self.window_of else self._free).append(slot)

    def each(self, slot: int) -> tuple[int, ...]:
        """Return a slot, with the second one of a pair."""
        return (slot, slot + 1) if slot in self.window_of else (slot,)

    def bits(self, slot: int) -> int:
        """Return the bits of `each`, and that of the tiers."""
        tier = self.tier_of.get(slot)
        return slot_bit(slot) * (3 if slot in self.window_of else 1) | (0 if tier is None else slot_bit(tier))

    def _own(self, slot: int, worker_id: WorkerId | None) -> None:
        num_slots = self.each(slot)[-1] + 1
        owners = [*self.owners, *[None] * (num_slots - len(self.owners))]
        owners[slot] = worker_id
        self.owners = owners

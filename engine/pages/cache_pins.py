"""Cached pages that a tenant has pinned: they go last, until their time is over.

A mark pins the leading blocks of a prompt, once they are published, for its time; every later use of a block by the
same tenant begins that time anew. A pin is no reference: a pinned page that nobody holds is free, and is allocated when
no other page is left, so pins never keep a request waiting. They only say which cached pages go last, the longest
unused of them first. What is bounded: the pages that one tenant has pinned here, and those of all tenants together.

Leaf before parent: a pin of a block covers all blocks before it for at least as long, since marks count from the
beginning of the prompt and bounds cut off its end. A page therefore leaves the pins no earlier than the pages behind
it. Pins that end together end from the last block on.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from common.clock import Clock
from engine.cache_marks import CacheMarks

MAX_PINNED_SHARE = 0.5
"""Most pages of a worker that pins of all tenants may cover."""


class _Pin:
    """One tenant's pin of one page."""

    __slots__ = ("due_s", "ttl_s", "until_s")

    def __init__(self, until_s: float, ttl_s: float) -> None:
        self.until_s = self.due_s = until_s
        """`due_s`: when to look at it next."""
        self.ttl_s = ttl_s


class CachePins:
    """The pins of one pool. Engine thread only; all operations but `counts` are O(blocks named), amortized."""

    def __init__(self, num_blocks: int, clock: Clock) -> None:
        self._clock = clock
        self._max_blocks = round(MAX_PINNED_SHARE * num_blocks)
        self._tenants: dict[str, dict[int, _Pin]] = {}
        self._num_owners = array("H", [0]) * num_blocks
        """Tenants that have pinned each page; serving.yaml lists at most 1024."""
        self.num_blocks = 0
        """Pages that are pinned."""
        self.free: OrderedDict[int, None] = OrderedDict()
        """Pinned pages that nobody holds, the longest unused first, children before parents."""
        self._num_pins = 0
        self.num_evicted = 0
        """Pinned pages that were allocated, since start."""
        self._due: list[tuple[float, int, int, str]] = []
        """Heap of (time, -place in its prompt, page, tenant): one valid entry for each pin."""

    def holds(self, block_id: int) -> bool:
        """Whether a page is pinned."""
        return self._num_owners[block_id] > 0

    def counts(self) -> Mapping[str, int]:
        """Return the pages that each tenant has pinned."""
        return {tenant: len(pins) for tenant, pins in self._tenants.items()}

    def pin(self, marks: CacheMarks, block_table: Sequence[int]) -> int:
        """Pin the published pages of a held table up to its marks; returns how many leading ones are pinned now."""
        pins = self._tenants.setdefault(marks.tenant, {})
        is_over = len(pins) > marks.max_blocks  # the tenant may pin less than before: what is above that ends in time
        now_s, num_pinned = self._clock.monotonic(), 0
        for num_blocks, ttl_s in marks.spans():
            for place in range(num_pinned, min(num_blocks, len(block_table))):
                pin = pins.get(block_table[place])
                if pin is not None:
                    if not is_over:
                        pin.ttl_s = max(pin.ttl_s, ttl_s)
                        pin.until_s = max(pin.until_s, now_s + pin.ttl_s)
                elif not self._add(marks, pins, block_table[place], place, _Pin(now_s + ttl_s, ttl_s)):
                    break
                num_pinned += 1
            if num_pinned < num_blocks:
                break
        if not pins:
            del self._tenants[marks.tenant]
        return num_pinned

    def _add(self, marks: CacheMarks, pins: dict[int, _Pin], block_id: int, place: int, pin: _Pin) -> bool:
        """Return whether the bounds allow one more pin, which is then made."""
        is_new = not self._num_owners[block_id]
        if len(pins) >= marks.max_blocks or (is_new and self.num_blocks >= self._max_blocks):
            return False
        pins[block_id] = pin
        self._num_owners[block_id] += 1
        self.num_blocks += is_new
        self._num_pins += 1
        heapq.heappush(self._due, (pin.due_s, -place, block_id, marks.tenant))
        self._compact()
        return True

    def touch(self, marks: CacheMarks, block_ids: Sequence[int]) -> None:
        """Begin the time of a tenant's pins anew, for leading pages that a request of it has found."""
        pins = self._tenants.get(marks.tenant)
        if pins is None or len(pins) > marks.max_blocks:
            return
        now_s = self._clock.monotonic()
        for block_id in block_ids:
            pin = pins.get(block_id)
            if pin is None or pin.until_s <= now_s:
                return  # nothing behind it is pinned
            pin.until_s = max(pin.until_s, now_s + pin.ttl_s)

    @property
    def wait_s(self) -> float | None:
        """Time until a pin may end; None: nothing is pinned."""
        return self._due[0][0] - self._clock.monotonic() if self._due else None

    def expire(self) -> Iterator[int]:
        """End the pins whose time is over; yields pages that no pin covers any more, children before parents."""
        if not self._due or self._due[0][0] > (now_s := self._clock.monotonic()):
            return
        while self._due and self._due[0][0] <= now_s:
            due_s, place, block_id, tenant = heapq.heappop(self._due)
            if not self._is_due(due_s, place, block_id, tenant):
                continue
            pin = self._tenants[tenant][block_id]
            if pin.until_s > due_s:  # used since; what is over now still ends in the order of its time
                pin.due_s = pin.until_s
                heapq.heappush(self._due, (pin.due_s, place, block_id, tenant))
            elif self._remove(tenant, block_id):
                yield block_id

    def drop(self, block_id: int) -> None:
        """End all pins of a page that loses its content."""
        if self._num_owners[block_id]:
            self.free.pop(block_id, None)
            for tenant in [name for name, pins in self._tenants.items() if block_id in pins]:
                self._remove(tenant, block_id)

    def evict(self) -> int:
        """Take out and return the page that goes first."""
        block_id, _ = self.free.popitem(last=False)
        self.num_evicted += 1
        return block_id

    def _remove(self, tenant: str, block_id: int) -> bool:
        """End a pin; returns whether it was the page's last one."""
        pins = self._tenants[tenant]
        del pins[block_id]
        self._num_pins -= 1
        if not pins:
            del self._tenants[tenant]
        self._num_owners[block_id] -= 1
        is_last = not self._num_owners[block_id]
        self.num_blocks -= is_last
        return is_last

    def _compact(self) -> None:
        """Drop entries of pins that have ended early, once they are the greater part."""
        if len(self._due) > 2 * self._num_pins + 64:
            self._due = [each for each in self._due if self._is_due(*each)]
            heapq.heapify(self._due)

    def _is_due(self, due_s: float, _place: int, block_id: int, tenant: str) -> bool:
        """Whether an entry is that of a pin."""
        pin = self._tenants.get(tenant, {}).get(block_id)
        return pin is not None and pin.due_s == due_s

"""Groups of workers that hold, or can use, equally much of a prompt.

A worker whose model has window pages (`engine/pages/window_pages.py`) begins behind k cached blocks only if those
in the window before their end have pages.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.window import BlockWindow

STAMP_BITS = 36
"""Low bits of the index's values; a bit for each slot follows."""
MAX_LOOKS = 8192
"""Most groups that are compared with a block's pages in a lookup, in a few milliseconds."""
Group = tuple[int, int]
"""Leading blocks of a prompt, and a bit mask of the workers that have them."""


def slot_bit(slot: int) -> int:
    """Return the bit of a slot in the index's values."""
    return 1 << (slot + STAMP_BITS)


def held_groups(keys: Sequence[int], values: Mapping[int, int], live: int) -> list[Group]:
    """Return how many leading blocks the workers hold, which have these bits in the index's values; fewest first."""
    groups: list[Group] = []
    get = values.get
    alive = get(keys[0], 0) & live if keys else 0
    if not alive:
        return groups
    last = len(keys) - 1
    hold_all = alive & get(keys[last], 0)
    # Each worker of an entry holds block `low` but not block `high`. Workers with fewer blocks come first.
    ranges = [(alive ^ hold_all, 0, last)] if hold_all != alive else []
    while ranges:
        workers, low, high = ranges.pop()
        while high - low > 1:
            middle = (low + high) >> 1
            holders = workers & get(keys[middle], 0)
            if holders == workers:
                low = middle
            else:
                if holders:
                    ranges.append((holders, middle, high))
                    workers ^= holders
                high = middle
        groups.append((high, workers >> STAMP_BITS))
    if hold_all:
        groups.append((len(keys), hold_all >> STAMP_BITS))
    return groups


def usable_groups(held: Iterable[Group], paged: Callable[[int], int], window: BlockWindow) -> list[Group]:
    """Return how many blocks workers can begin behind that hold `held`; both fewest first, each number once.

    `paged` returns a mask of the workers for which block i has a page. Walks once from the end of the prompt to its
    beginning, for all workers together. Those for which MAX_LOOKS find nothing count as if they held nothing.
    """
    waiting = list(held)
    candidates: deque[Group] = deque()
    """Blocks behind which workers may begin, if those from `position` on are not the whole window yet; most first."""
    usable: list[Group] = []
    concerned = position = num_looks = 0
    while (waiting or candidates) and num_looks < MAX_LOOKS:
        if not candidates:
            position = waiting[-1][0]
        while waiting and waiting[-1][0] == position:
            _, workers = waiting.pop()
            concerned |= workers
            if candidates and candidates[-1][0] == position:
                workers |= candidates.pop()[1]
            candidates.append((position, workers))
        while candidates and position <= window.first_needed(candidates[0][0]):
            usable.append(candidates.popleft())
            concerned ^= usable[-1][1]
        if not candidates:
            continue
        here = paged(position - 1)
        missing = concerned & ~here
        num_looks += 1
        if missing:
            num_looks += len(candidates)
            candidates = deque((end, workers & here) for end, workers in candidates if workers & here)
        # The same pages further on change nothing before other workers join, or the last window is complete.
        stop = waiting[-1][0] if waiting else 0
        if not missing:
            stop = max(stop, window.first_needed(candidates[-1][0]))
        position -= 1
        while position > stop and not (paged(position - 1) ^ here) & concerned:
            position -= 1
        if missing:
            candidates.append((position, missing))
    return [group for group in reversed(usable) if group[0]]


def merged(groups: Iterable[Group]) -> list[Group]:
    """Return groups, fewest blocks first, each number once."""
    workers_of: dict[int, int] = {}
    for num_blocks, workers in groups:
        workers_of[num_blocks] = workers_of.get(num_blocks, 0) | workers
    return sorted(workers_of.items())

"""Reads blocks from this worker's tiers into pages for a request that is expected here and has not come yet.

Routers ask for it while a request waits in their line. It is a read like that of a request (`prefix_pull.py`), but it
takes only pages that are empty or less valuable than a block that was just computed, and none that requests need. Its
blocks are then cached like all others, held by nobody. One is made at a time, and those of requests go on beside it.

Blocks that no prompt has used yet take at most `_MAX_SHARE` of the pages, and those of one root (one tenant) at most
half of what the other roots leave of that: a tenant that is first leaves room for the next one.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable

from common.block_hash import BlockHashes
from common.clock import Clock
from common.errors import Refused
from common.eviction import MAX_AGE, EvictionClass
from common.ids import BlockHash, HashRoot
from engine.interface import Engine
from engine.steps.landing import Landing
from worker.prefix_pull import PrefixPuller, PullOutcome

_MAX_SHARE = 0.5
"""Most of the pages that unused blocks take."""
_MAX_BLOCKS = 4096
"""Most blocks of one read: the engine grants their pages between two steps."""
_VALUE = MAX_AGE[EvictionClass.COLD]
"""Value of a block that a request is about to use: that of a new one."""
_UNUSED_S = 60.0
"""Time after which a block that no prompt has used is given up; it stays cached."""


class AheadBlocks:
    """Blocks that were read ahead, until a prompt uses them or they leave their page. Event loop only."""

    def __init__(self, num_pages: int, clock: Clock) -> None:
        self.num_used = 0
        """Blocks of requests that came."""
        self.num_wasted = 0
        """Blocks that left their page before, or that no prompt has used in time."""
        self._most = int(_MAX_SHARE * num_pages)
        self._clock = clock
        self._unused: OrderedDict[BlockHash, tuple[HashRoot, float]] = OrderedDict()
        """Their roots and when they came, the oldest first."""
        self._num_of: Counter[HashRoot] = Counter()

    def room_of(self, root: HashRoot) -> int:
        """Return how many further blocks of a root may be read ahead now."""
        given_up_s = self._clock.monotonic() - _UNUSED_S
        while self._unused and next(iter(self._unused.values()))[1] <= given_up_s:
            self.drop([next(iter(self._unused))])
        own = self._num_of[root]
        return max(0, (self._most - (len(self._unused) - own)) // 2 - own)

    def add(self, hashes: Iterable[BlockHash], root: HashRoot) -> None:
        """Note blocks that have come."""
        for block_hash in hashes:
            self._take_out(block_hash)
            self._unused[block_hash] = root, self._clock.monotonic()
            self._num_of[root] += 1

    def use(self, hashes: BlockHashes) -> None:
        """Note a prompt that has come."""
        if self._unused:
            self.num_used += sum(map(self._take_out, hashes))

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        """Note blocks that have left their pages."""
        if self._unused:
            self.num_wasted += sum(map(self._take_out, hashes))

    def _take_out(self, block_hash: BlockHash) -> bool:
        root, _came_s = self._unused.pop(block_hash, (None, 0.0))
        if root is None:
            return False
        self._num_of[root] -= 1
        if not self._num_of[root]:
            del self._num_of[root]
        return True


class ReadAhead:
    """Reads ahead for one worker. Event loop only."""

    def __init__(self, prefixes: PrefixPuller, *, num_pages: int, clock: Clock) -> None:
        self.outcomes: Counter[PullOutcome] = Counter()
        self.blocks = AheadBlocks(num_pages, clock)
        self._prefixes = prefixes
        self._one_at_a_time = asyncio.Lock()
        prefixes.on_use = self.blocks.use

    async def read(self, hashes: BlockHashes, root: HashRoot, *, time_limit_s: float) -> int:
        """Read what tiers have of a prompt behind its cached blocks; returns how many came. A failure is an outcome."""
        outcome, num_read = PullOutcome.CANCELLED, 0

        def note(come: BlockHashes) -> None:
            nonlocal num_read
            num_read += len(come)
            self.blocks.add(come, root)

        def reserve(core: Engine, landing: Landing) -> Refused | None:
            return core.landings.reserve_below(landing, [_VALUE] * len(landing.hashes), max_blocks)

        try:
            async with asyncio.timeout(time_limit_s), self._one_at_a_time:
                max_blocks = min(_MAX_BLOCKS, self.blocks.room_of(root))
                outcome = await self._prefixes.read_ahead(hashes, root, reserve, note)
        except TimeoutError:
            outcome = PullOutcome.TIMEOUT
        finally:
            self.outcomes[outcome] += 1
        return num_read

"""Fetches leading blocks of a prompt: from this worker's tiers, then from another worker's cache.

Most often that is before a request enters the engine.

1. Between two engine steps the request takes its place in the queue, and missing blocks of the prefix get pages if
   there is room. If another request is pulling the same prefix, this one waits, and then pulls what is still missing.
2. The tiers are read (`worker_tiers.py`), or the source pins the blocks that it has and sends them (`KvPuller`).
3. Verified blocks are published in the prefix cache. The request enters at its place and finds them there.

A pull never fails its request: when it fails, or takes longer than computing would, it is counted by reason, the source
is notified, and the prompt is computed. Other requests are computed meanwhile.

A request's hashes are computed here, from its tokens. Hashes from a list of prefixes (`prefix_service.py`) come without
tokens: the source looks them up in its own cache. Only computing KV can show that it is right, so a worker trusts its
peers, which belong to the cluster.
"""

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from common.block_hash import BlockHashes, num_usable_blocks
from common.errors import KvCorrupt, KvIncomplete, KvrelayError, LayoutMismatch, Refused, StaleEpoch, WorkerLost
from common.ids import NO_ROOT, BlockHash, Epoch, HashRoot, WorkerId
from common.pooling import Pooling
from common.prefix_chains import PrefixChain
from common.tracing import Stages
from engine.events import EngineLoad
from engine.interface import Engine
from engine.request import EngineRequest, Retention
from engine.steps.landing import Landing
from engine.thread import EngineDriver
from kv_transfer.pull import KvPuller, PullPlan
from kv_transfer.wanted import WantedBlocks
from kvrelay.v1 import sequence_pb2
from worker.peers import PeerChannels
from worker.worker_tiers import WorkerTiers

logger = logging.getLogger(__name__)

MIN_PULL_S = 0.25
"""Shortest time limit of a pull: predictions of milliseconds are noise."""


class PullOutcome(enum.Enum):
    """Results of pulls of cached blocks, as counted in metrics."""

    PULLED = "pulled"
    PARTIAL = "partial"
    """The source had only some of the blocks."""
    PRESENT = "present"
    """All blocks were here, or came with another request's pull."""
    EVICTED = "evicted"
    """The source, or the tiers, had no block that was missing here."""
    NO_ROOM = "no_room"
    TIMEOUT = "timeout"
    """Computing would have been faster."""
    LOST = "lost"
    """The connection to the source failed."""
    STALE = "stale"
    """The source is a new process."""
    LAYOUT = "layout"
    """The source's blocks have another layout."""
    INCOMPLETE = "incomplete"
    """Bytes were missing or wrong."""
    REFUSED = "refused"
    """The source refused for another reason."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """Result of a pull without a request."""

    outcome: PullOutcome
    num_cached_blocks: int
    """Leading blocks that were here before."""
    num_blocks: int
    """Leading blocks that are here now."""


Reserve = Callable[[Engine, Landing], Refused | None]
"""Holds the cached blocks of a landing, and gets pages for the others. Engine thread."""
Fetch = Callable[[Landing], Awaitable[PullOutcome]]
"""Fills the pages of a landing from some place, and publishes what is whole."""


@dataclass(slots=True)
class PullingRequest:
    """One request that pulls before it enters the engine."""

    reserve: Reserve
    landing: Landing | None = None
    """For `Engine.add`: the place in the queue and the pulled blocks; None before the first pull."""
    is_kept: bool = True
    """Whether its blocks may be kept in tiers."""
    lacks_room: bool = False
    """Whether it waits for pages: what computes needs them, too."""


_BY_ERROR: dict[type[KvrelayError], PullOutcome] = {
    WorkerLost: PullOutcome.LOST,
    StaleEpoch: PullOutcome.STALE,
    LayoutMismatch: PullOutcome.LAYOUT,
    KvIncomplete: PullOutcome.INCOMPLETE,
    KvCorrupt: PullOutcome.INCOMPLETE,
}


class PrefixPuller:
    """Pulls for one worker. Event loop only."""

    def __init__(
        self,
        *,
        engine: EngineDriver,
        puller: KvPuller,
        peers: PeerChannels,
        block_size: int,
        prefill_s: Callable[[int, int], float],
        tiers: WorkerTiers | None = None,
    ) -> None:
        self.outcomes: Counter[PullOutcome] = Counter()
        """Of pulls from other workers."""
        self.tier_outcomes: Counter[PullOutcome] = Counter()
        """Of reads from this worker's tiers."""
        self._engine = engine
        self._puller = puller
        self._peers = peers
        self._block_size = block_size
        self._tiers = tiers
        self._prefill_s = prefill_s
        """Predicts the seconds to compute some tokens behind some cached ones."""
        self._load = engine.core.load()
        self._freed = asyncio.Event()
        """Set when there may be room for a pull that there was none for."""
        self.on_use: Callable[[BlockHashes], None] = lambda _hashes: None
        """Called with the blocks of a request after the tiers were read for it, by this pull or another one."""
        self._roots: Counter[HashRoot] = Counter()
        """Roots of running pulls."""
        self._running: dict[BlockHash, asyncio.Event] = {}
        """Ends of running pulls, by the blocks that were the first missing one of a chain since they began."""

    def is_fetching(self, root: HashRoot) -> bool:
        """Whether blocks of a root, or of an unknown one, are on their way into pages."""
        return self._roots[root] + self._roots[NO_ROOT] > 0

    @contextmanager
    def arrival(
        self, reserve: Reserve = lambda core, landing: core.landings.reserve(landing)
    ) -> Iterator[PullingRequest]:
        """Hold the pages of a pull during the block, in which the request enters the engine.

        `reserve` gets the pages; by default they are granted as to any request.
        """
        arrival = PullingRequest(reserve)
        try:
            yield arrival
        finally:
            if arrival.landing is not None:
                self._release(arrival.landing)

    def note_load(self, load: EngineLoad) -> None:
        """Look again for pages when some have become free, or a request that waited for them has gone."""
        before, self._load = self._load, load
        if load.num_used_blocks < before.num_used_blocks or load.num_waiting < before.num_waiting:
            self._freed.set()
            self._freed = asyncio.Event()

    async def fetch(
        self,
        arrival: PullingRequest,
        request: EngineRequest,
        source: sequence_pb2.KvSource | None,
        stages: Stages,
    ) -> None:
        """Bring blocks that are missing here into the cache, if that can be done in time: from tiers, then a source."""
        needs_all = request.sampling.num_prompt_logprobs is not None or request.pooling is Pooling.MEAN
        if needs_all or (source is None and self._tiers is None):
            return
        num_usable = num_usable_blocks(len(request.prompt_token_ids) + len(request.output_token_ids), self._block_size)
        hashes, root = request.block_hashes[:num_usable], request.hash_root
        arrival.is_kept = request.retention is Retention.KEEP
        extra = {"request_id": request.request_id}
        if self._tiers is not None and (num_held := self._tiers.num_worth_reading(hashes)):
            stages.enter("tier")
            outcome = await self._try(arrival, hashes[:num_held], root, self._read, self.tier_outcomes)
            logger.info("tiers read", extra=extra | {"outcome": outcome.value})
            stages.note(outcome=outcome.value)
        self.on_use(hashes)
        if source is not None and (wanted := hashes[: source.num_blocks]):
            stages.enter("pull", source=source.worker_id)
            outcome = await self._try(arrival, wanted, root, partial(self._pull_from, source), self.outcomes)
            logger.info("prefix pull", extra=extra | {"source": source.worker_id, "outcome": outcome.value})
            stages.note(outcome=outcome.value)

    async def _try(
        self,
        arrival: PullingRequest,
        hashes: BlockHashes,
        root: HashRoot,
        fetch: Fetch,
        counts: "Counter[PullOutcome]",
    ) -> PullOutcome:
        """Fetch missing blocks in the time that computing them would take; what fails is an outcome, too."""
        outcome = PullOutcome.CANCELLED
        try:
            async with asyncio.timeout(None) as limit:
                outcome = await self._land_and_fetch(arrival, hashes, root, fetch, limit)
        except TimeoutError:
            outcome = PullOutcome.NO_ROOM if arrival.lacks_room else PullOutcome.TIMEOUT
        except KvrelayError as error:
            outcome = _BY_ERROR.get(type(error), PullOutcome.REFUSED)
        finally:
            counts[outcome] += 1
        return outcome

    async def pull_chain(self, chain: PrefixChain, source: sequence_pb2.KvSource, *, max_blocks: int) -> PullResult:
        """Pull up to `max_blocks` of a whole chain, in exchange for less valuable blocks. Raises KvrelayError."""

        def reserve(core: Engine, landing: Landing) -> Refused | None:
            return core.landings.reserve_below(landing, chain.values, max_blocks)

        with self.arrival(reserve) as arrival:
            outcome = await self._land_and_fetch(arrival, chain.hashes, NO_ROOT, partial(self._pull_from, source), None)
            landing = arrival.landing
            assert landing is not None, "a pull that ended has a landing"
            # After the commit, and before the release.
            num_blocks = await self._engine.call(lambda core: core.landings.mark_reused(landing, chain.num_reused))
            return PullResult(outcome=outcome, num_cached_blocks=landing.num_cached_blocks, num_blocks=num_blocks)

    async def read_ahead(
        self, hashes: BlockHashes, root: HashRoot, reserve: Reserve, on_blocks: Callable[[BlockHashes], None]
    ) -> PullOutcome:
        """Read what tiers have of a prompt that has not come; `on_blocks` is called with blocks that are there."""
        num_held = 0 if self._tiers is None else self._tiers.num_readable(hashes)
        if not num_held:
            return PullOutcome.PRESENT
        with self.arrival(reserve) as arrival:
            fetch = partial(self._read, on_blocks=on_blocks)
            return await self._land_and_fetch(arrival, hashes[:num_held], root, fetch, None)

    async def _land_and_fetch(
        self,
        arrival: PullingRequest,
        hashes: BlockHashes,
        root: HashRoot,
        fetch: Fetch,
        limit: asyncio.Timeout | None,
    ) -> PullOutcome:
        while True:
            freed = self._freed  # as of before it is refused: pages may be freed before this task goes on
            landing, refused = await self._land(arrival, hashes, root)
            if landing.num_missing_blocks == 0:
                return PullOutcome.PRESENT
            if limit is not None and limit.when() is None:
                limit.reschedule(asyncio.get_running_loop().time() + self._longest_s(landing))
            key = hashes[landing.num_cached_blocks]
            other = self._running.get(key)
            if other is not None:
                self._release(landing)
                await other.wait()
                continue
            if refused is not None:
                if limit is None:
                    return PullOutcome.NO_ROOM
                arrival.lacks_room = True
                await freed.wait()
                continue
            arrival.lacks_room = False
            ended = self._running[key] = asyncio.Event()
            self._roots[root] += 1
            try:
                return await fetch(landing)
            finally:
                self._roots[root] -= 1
                self._roots += Counter()  # without those that are 0: clients can make up any number
                self._running = {key: end for key, end in self._running.items() if end is not ended}
                ended.set()

    def _longest_s(self, landing: Landing) -> float:
        size = self._block_size
        return max(MIN_PULL_S, self._prefill_s(landing.num_missing_blocks * size, landing.num_cached_blocks * size))

    async def _land(
        self, arrival: PullingRequest, hashes: BlockHashes, root: HashRoot
    ) -> tuple[Landing, Refused | None]:
        def land(core: Engine) -> tuple[Landing, Refused | None]:
            landing = arrival.landing or core.arrive(hashes)
            if arrival.landing is not None:
                core.landings.release(landing)  # what came from another place is in the cache
            landing.hashes, landing.root, landing.is_kept = hashes, root, arrival.is_kept
            return landing, arrival.reserve(core, landing)

        landing, refused = await self._engine.acquire(land, _let_go)
        arrival.landing = landing
        return landing, refused

    def _release(self, landing: Landing) -> None:
        self._engine.post(lambda core: core.landings.release(landing))

    async def _read(self, landing: Landing, on_blocks: Callable[[BlockHashes], None] | None = None) -> PullOutcome:
        assert self._tiers is not None, "there are no tiers"

        ended = self._running[landing.hashes[landing.num_cached_blocks]]
        num_here = landing.num_cached_blocks

        def commit(num_blocks: int) -> None:
            nonlocal num_here
            self._engine.post(lambda core: core.landings.commit(landing, num_blocks))
            if on_blocks is not None:
                on_blocks(landing.hashes[num_here:num_blocks])
                num_here = num_blocks
                self._engine.post(lambda core: core.landings.mark_reused(landing, num_blocks))
            if num_blocks < len(landing.hashes):  # who comes now misses this one first
                self._running.setdefault(landing.hashes[num_blocks], ended)

        num_read = await self._tiers.read(landing, commit)
        if not num_read:
            return PullOutcome.EVICTED
        return PullOutcome.PULLED if num_read == landing.num_missing_blocks else PullOutcome.PARTIAL

    async def _pull_from(self, source: sequence_pb2.KvSource, landing: Landing) -> PullOutcome:
        plan = PullPlan(
            peer=WorkerId(source.worker_id),
            epoch=Epoch(source.epoch),
            wanted=WantedBlocks(hashes=landing.hashes, block_size=self._block_size, root=landing.root),
            block_table=landing.block_ids(),  # reserved: only this pull changes it
            windows=landing.windows,
            first_block=landing.num_cached_blocks,
            ticket=source.ticket,
        )
        async with self._peers.use(plan.peer, source.address) as channel:
            pulled = await self._puller.pull(plan, channel)
        if not pulled.num_blocks:
            return PullOutcome.EVICTED
        num_blocks, prefix = pulled.manifest.num_blocks, pulled.manifest.prefix
        self._engine.post(lambda core: core.landings.commit(landing, num_blocks, prefix))  # before the request enters
        return PullOutcome.PULLED if num_blocks == len(landing.hashes) else PullOutcome.PARTIAL


def _let_go(core: Engine, landed: tuple[Landing, Refused | None]) -> None:
    core.landings.release(landed[0])

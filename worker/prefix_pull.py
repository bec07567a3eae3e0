"""Pulls leading blocks of a prompt from another worker's cache, most often before a request enters the engine.

1. Between two engine steps the request takes its place in the queue, and missing blocks of the prefix get pages if
   there is room. If another request is pulling the same prefix, this one waits, and then pulls what is still missing.
2. The source pins the blocks that it has and sends them (`KvPuller`).
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.block_hash import BlockHashes, num_usable_blocks
from common.errors import KvCorrupt, KvIncomplete, KvrelayError, LayoutMismatch, Refused, StaleEpoch, WorkerLost
from common.ids import BlockHash, Epoch, WorkerId
from common.pooling import Pooling
from common.prefix_chains import PrefixChain
from common.tracing import Stages
from engine.interface import Engine
from engine.request import EngineRequest
from engine.steps.landing import Landing
from engine.thread import EngineDriver
from kv_transfer.pull import KvPuller, PullPlan
from kv_transfer.wanted import WantedBlocks
from kvrelay.v1 import sequence_pb2
from worker.peers import PeerChannels

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
    """The source had no block that was missing here."""
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


@dataclass(slots=True)
class PullingRequest:
    """One request that pulls before it enters the engine."""

    reserve: Reserve
    landing: Landing | None = None
    """For `Engine.add`: the place in the queue and the pulled blocks; None before the first pull."""


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
    ) -> None:
        self.outcomes: Counter[PullOutcome] = Counter()
        self._engine = engine
        self._puller = puller
        self._peers = peers
        self._block_size = block_size
        self._prefill_s = prefill_s
        """Predicts the seconds to compute some tokens behind some cached ones."""
        self._running: dict[BlockHash, asyncio.Event] = {}
        """Ends of running pulls, by first missing block: a chain has only one such block in a cache."""

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

    async def pull(
        self, arrival: PullingRequest, request: EngineRequest, source: sequence_pb2.KvSource, stages: Stages
    ) -> None:
        """Pull the source's blocks that are missing here into the cache, if that can be done in time."""
        num_usable = num_usable_blocks(len(request.prompt_token_ids) + len(request.output_token_ids), self._block_size)
        hashes = request.block_hashes[: min(num_usable, source.num_blocks)]
        needs_all = request.sampling.num_prompt_logprobs is not None or request.pooling is Pooling.MEAN
        if needs_all or not hashes:
            return
        stages.enter("pull", source=source.worker_id)
        outcome = PullOutcome.CANCELLED
        try:
            async with asyncio.timeout(None) as limit:
                outcome = await self._pull(arrival, hashes, source, limit)
        except TimeoutError:
            outcome = PullOutcome.TIMEOUT
        except KvrelayError as error:
            outcome = _BY_ERROR.get(type(error), PullOutcome.REFUSED)
        finally:
            self.outcomes[outcome] += 1
            extra = {"request_id": request.request_id, "source": source.worker_id, "outcome": outcome.value}
            logger.info("prefix pull", extra=extra)
            stages.note(outcome=outcome.value)

    async def pull_chain(self, chain: PrefixChain, source: sequence_pb2.KvSource, *, max_blocks: int) -> PullResult:
        """Pull up to `max_blocks` of a whole chain, in exchange for less valuable blocks. Raises KvrelayError."""

        def reserve(core: Engine, landing: Landing) -> Refused | None:
            return core.landings.reserve_below(landing, chain.values, max_blocks)

        with self.arrival(reserve) as arrival:
            outcome = await self._pull(arrival, chain.hashes, source, None)
            landing = arrival.landing
            assert landing is not None, "a pull that ended has a landing"
            # After the commit, and before the release.
            num_blocks = await self._engine.call(lambda core: core.landings.mark_reused(landing, chain.num_reused))
            return PullResult(outcome=outcome, num_cached_blocks=landing.num_cached_blocks, num_blocks=num_blocks)

    async def _pull(
        self,
        arrival: PullingRequest,
        hashes: BlockHashes,
        source: sequence_pb2.KvSource,
        limit: asyncio.Timeout | None,
    ) -> PullOutcome:
        while True:
            landing, refused = await self._land(arrival, hashes)
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
                return PullOutcome.NO_ROOM
            ended = self._running[key] = asyncio.Event()
            try:
                return await self._fetch(landing, source)
            finally:
                del self._running[key]
                ended.set()

    def _longest_s(self, landing: Landing) -> float:
        size = self._block_size
        return max(MIN_PULL_S, self._prefill_s(landing.num_missing_blocks * size, landing.num_cached_blocks * size))

    async def _land(self, arrival: PullingRequest, hashes: BlockHashes) -> tuple[Landing, Refused | None]:
        def land(core: Engine) -> tuple[Landing, Refused | None]:
            landing = arrival.landing or core.arrive(hashes)
            return landing, arrival.reserve(core, landing)

        landing, refused = await self._engine.acquire(land, _let_go)
        arrival.landing = landing
        return landing, refused

    def _release(self, landing: Landing) -> None:
        self._engine.post(lambda core: core.landings.release(landing))

    async def _fetch(self, landing: Landing, source: sequence_pb2.KvSource) -> PullOutcome:
        plan = PullPlan(
            peer=WorkerId(source.worker_id),
            epoch=Epoch(source.epoch),
            wanted=WantedBlocks(hashes=landing.hashes, block_size=self._block_size),
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

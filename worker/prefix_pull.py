"""Pulls leading blocks of a prompt from another worker's cache, most often before a request enters the engine.

1. Between two engine steps the request takes its place in line; what the cache lacks of the prefix gets pages, if there
   is room. A request whose prefix somebody else is pulling just now waits for that, and pulls what lacks afterwards.
2. The source pins what it holds, and sends it (`KvPuller`).
3. What was verified is published in the prefix cache. The request enters at its place and finds it there.

Nothing of this can fail the request: whatever goes wrong, or takes longer than computing would, is counted by reason,
the source is told, and the prompt is computed. Other requests are computed meanwhile.

A request's hashes are computed here, from its tokens. Those that a list of prefixes names (`prefix_intake.py`) have no
tokens beside them, and need none: the source looks up each one in its own cache and sends the KV that it keeps there.
That the KV is right can only be checked by computing it, so a worker believes its peers, which belong to the cluster.
"""

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.block_hash import BlockHashes
from common.errors import KvIncomplete, KvrelayError, LayoutMismatch, Refused, StaleEpoch, WorkerLost
from common.ids import BlockHash, Epoch, WorkerId
from common.prefix_chains import PrefixChain
from engine.core import EngineCore
from engine.landing import Landing
from engine.sequence import EngineRequest
from engine.thread import EngineDriver
from kv_transfer.pull import KvPuller, PullPlan
from kv_transfer.wanted import WantedBlocks
from kvrelay.v1 import sequence_pb2
from worker.peers import PeerChannels

logger = logging.getLogger(__name__)

MIN_PULL_S = 0.25
"""A pull may take this long, however fast computing would be: predictions of milliseconds are noise."""


class PullOutcome(enum.Enum):
    """How a pull of cached blocks ended."""

    PULLED = "pulled"
    PARTIAL = "partial"
    """The source had a part of it."""
    PRESENT = "present"
    """All of it was here, or came with another request's pull."""
    EVICTED = "evicted"
    """The source had nothing beyond what was here."""
    NO_ROOM = "no_room"
    TIMEOUT = "timeout"
    """Computing would have been faster."""
    LOST = "lost"
    """No connection to the source, or it broke."""
    STALE = "stale"
    """The source is a new process."""
    LAYOUT = "layout"
    """The source's blocks are of another kind."""
    INCOMPLETE = "incomplete"
    """Bytes were missing or wrong."""
    REFUSED = "refused"
    """The source said no for another reason."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What a pull for no request has come to."""

    outcome: PullOutcome
    num_cached: int
    """Leading blocks that were here before."""
    num_here: int
    """Leading blocks that are here now."""


Reserve = Callable[[EngineCore, Landing], Refused | None]
"""Holds what is cached of a landing's blocks, and gets pages for others; the engine thread runs it."""

_BY_ERROR: dict[type[KvrelayError], PullOutcome] = {
    WorkerLost: PullOutcome.LOST,
    StaleEpoch: PullOutcome.STALE,
    LayoutMismatch: PullOutcome.LAYOUT,
    KvIncomplete: PullOutcome.INCOMPLETE,
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
        """Predicted time to compute so many tokens behind so many present ones."""
        self._running: dict[BlockHash, asyncio.Event] = {}
        """By the first block that a running pull lacks. In one chain and one cache there is only one such block."""

    @contextmanager
    def arrival(self, reserve: "Reserve | None" = None) -> Iterator["Arrival"]:
        """Hold what a pull has for the duration of the block, in which the request enters the engine.

        `reserve` gets the pages; without it they are granted as to any request.
        """
        arrival = Arrival(self, reserve or _reserve)
        try:
            yield arrival
        finally:
            if arrival.landing is not None:
                self._release(arrival.landing)

    async def pull(self, arrival: "Arrival", request: EngineRequest, source: sequence_pb2.KvSource) -> None:
        """See `Arrival.pull`."""
        # The last token is always computed: its logits choose the next one.
        num_usable = (len(request.prompt_token_ids) + len(request.output_token_ids) - 1) // self._block_size
        hashes = request.block_hashes[: min(num_usable, source.num_blocks)]
        if request.sampling.num_prompt_logprobs is not None or not hashes:
            return
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

    async def bring(self, chain: PrefixChain, source: sequence_pb2.KvSource, *, max_blocks: int) -> Brought:
        """Pull for no request: up to `max_blocks` of a chain without trunk, in exchange for what is worth less.

        Raises KvrelayError.
        """

        def reserve(core: EngineCore, landing: Landing) -> Refused | None:
            return core.landings.reserve_below(landing, chain.values, max_blocks)

        with self.arrival(reserve) as arrival:
            outcome = await self._pull(arrival, chain.hashes, source, None)
            landing = arrival.landing
            assert landing is not None, "a pull that ended has a landing"
            # Behind the commit, and before the release.
            num_here = await self._engine.call(lambda core: core.landings.mark_reused(landing, chain.num_reused))
            return Brought(outcome=outcome, num_cached=landing.num_cached_blocks, num_here=num_here)

    async def _pull(
        self,
        arrival: "Arrival",
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

    async def _land(self, arrival: "Arrival", hashes: BlockHashes) -> tuple[Landing, Refused | None]:
        def land(core: EngineCore) -> tuple[Landing, Refused | None]:
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
            block_table=landing.block_ids(),  # reserved: nothing but this pull changes it
            first_block=landing.num_cached_blocks,
            ticket=source.ticket,
        )
        async with self._peers.use(plan.peer, source.address) as channel:
            pulled = await self._puller.pull(plan, channel)
        if not pulled.num_blocks:
            return PullOutcome.EVICTED
        num_blocks = pulled.manifest.num_blocks
        self._engine.post(lambda core: core.landings.commit(landing, num_blocks))  # before the request enters
        return PullOutcome.PULLED if num_blocks == len(landing.hashes) else PullOutcome.PARTIAL


class Arrival:
    """One request that pulls before it enters the engine."""

    def __init__(self, puller: PrefixPuller, reserve: Reserve) -> None:
        self.landing: Landing | None = None
        """For `EngineCore.add`: place in line and what was pulled; None when nothing was tried."""
        self.reserve = reserve
        self._puller = puller

    async def pull(self, request: EngineRequest, source: sequence_pb2.KvSource) -> None:
        """Bring the blocks that the source holds and this worker lacks into the cache, if it can be done in time."""
        await self._puller.pull(self, request, source)


def _reserve(core: EngineCore, landing: Landing) -> Refused | None:
    return core.landings.reserve(landing)


def _let_go(core: EngineCore, landed: tuple[Landing, Refused | None]) -> None:
    core.landings.release(landed[0])

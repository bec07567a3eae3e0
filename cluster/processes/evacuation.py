"""Moves hot prefixes between workers: off a worker before it stops, and to a new worker before it serves.

*Evacuation*: a worker that stops lists its hottest prefixes, and workers that stay pull them: first those of its own
pool, first those with the most room; each prefix goes to one of them. *Warming*: a new worker pulls the hottest
prefixes of its peers before any router knows it. Routers learn of both from the workers' ordinary KV events.

A worker skips the blocks it has, and evicts none of higher value for them (`worker/prefix_service.py`). Time and bytes
are bounded. No failure here fails a change of the pools: a prefix that is lost is computed again.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from cluster.processes.plan import ProcessRole
from common.errors import InvalidRequest
from common.ids import Epoch, WorkerId
from common.ports import with_port
from common.prefix_chains import ChainSelection, PrefixChain, chains_from_proto, chains_to_proto
from common.trust.channels import Reach
from common.trust.tickets import ANY_CACHED, PullRight
from kvrelay.v1 import prefix_pb2, prefix_pb2_grpc, sequence_pb2, worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

MAX_EVACUATION_S = 10.0
GRACE_SHARE = 0.5
"""Share of a drain's grace that is spent on prefixes."""
WARMING_S = 3.0
_ANSWER_S = 1.0
"""Time to ask a worker for its room, and margin for an answer that is under way."""
_MAX_BLOCKS = 16384
_MAX_WARMING_BLOCKS = 4096
"""Limit for one peer, which lists them between two engine steps."""
_MAX_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A worker that serves."""

    worker_id: str
    address: str
    role: ProcessRole


@dataclass(slots=True, kw_only=True)
class Room:
    """A worker that takes prefixes, and the chains chosen for it."""

    peer: Peer
    num_free: int
    """Pages that are free or hold cold blocks."""
    is_second_choice: bool
    selection: ChainSelection
    num_taken: int = 0

    def fits(self, idx: int) -> bool:
        """Return whether there is room for a chain and the blocks before it."""
        return self.selection.num_blocks_of(idx) <= self.num_free - self.num_taken

    def take(self, idx: int) -> None:
        """Choose a chain."""
        self.num_taken += self.selection.num_blocks_of(idx)
        self.selection.add(idx)


def share_out(chains: Sequence[PrefixChain], rooms: Sequence[Room], *, max_blocks: int) -> None:
    """Give each chain, the most valuable first, to one room that has space for it.

    A chain follows its trunk until that room has its fair share; then another room gets both.
    """
    num_blocks = sum(len(chain.hashes) for chain in chains)
    tiers = [[room for room in rooms if room.is_second_choice is second] for second in (False, True)]
    for idx in range(len(chains)):
        if sum(room.num_taken for room in rooms) >= max_blocks:
            return
        for tier in tiers:
            fitting = [room for room in tier if room.fits(idx)]
            if not fitting:
                continue
            fair = num_blocks / len(tier)
            beside = [room for room in fitting if room.selection.has_trunk_of(idx) and room.num_taken < fair]
            max(beside or fitting, key=lambda room: room.num_free - room.num_taken).take(idx)
            break


class Evacuation:
    """Moves prefixes between workers. Event loop only; raises nothing but CancelledError."""

    def __init__(self, reach: Reach) -> None:
        """`reach`: how the controller calls workers."""
        self._connect = reach.worker
        self._issue = reach.issue

    async def evacuate(self, leaving: Peer, staying: Sequence[Peer], *, grace_s: float) -> int:
        """Move a worker's hottest prefixes to workers that stay, within a share of its grace; returns the blocks."""
        time_s = min(MAX_EVACUATION_S, GRACE_SHARE * grace_s)
        deadline_s = asyncio.get_running_loop().time() + time_s
        try:
            async with asyncio.timeout(time_s):
                free = await asyncio.gather(*(self._num_free(peer) for peer in staying))
                num_free = min(_MAX_BLOCKS, sum(free))
                if not num_free:
                    return 0
                chains, source, block_bytes = await self._hottest(leaving, num_free)
                rooms = [
                    Room(
                        peer=peer,
                        num_free=num,
                        is_second_choice=peer.role is not leaving.role,
                        selection=ChainSelection(chains),
                    )
                    for peer, num in zip(staying, free, strict=True)
                ]
                share_out(chains, rooms, max_blocks=_MAX_BYTES // block_bytes)
                asked = [self._pull(room.peer, source, room.selection.chosen, deadline_s) for room in rooms]
                return sum(await asyncio.gather(*asked))
        except (TimeoutError, grpc.RpcError, InvalidRequest) as error:
            _log_failure(leaving, error)
            return 0

    async def warm(self, newcomer: Peer, peers: Sequence[Peer]) -> int:
        """Copy hot prefixes of a new worker's peers, from its own pool if that has any, to it; returns the blocks."""
        deadline_s = asyncio.get_running_loop().time() + WARMING_S
        sources = [peer for peer in peers if peer.role is newcomer.role] or list(peers)
        num_moved = 0
        try:
            async with asyncio.timeout(WARMING_S):
                # Half of it: its first requests need room as well.
                num_free = await self._num_free(newcomer) // 2
                for peer in sources:
                    num_wanted = min(_MAX_WARMING_BLOCKS, num_free // len(sources))
                    if num_wanted:
                        chains, source, _block_bytes = await self._hottest(peer, num_wanted)
                        num_moved += await self._pull(newcomer, source, chains, deadline_s)
        except (TimeoutError, grpc.RpcError, InvalidRequest) as error:
            _log_failure(newcomer, error)
        return num_moved

    async def _num_free(self, peer: Peer) -> int:
        """Return a worker's free and cold pages; 0 if it does not answer."""
        async with self._connect(peer.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                answer = await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=_ANSWER_S)
            except grpc.RpcError as error:
                _log_failure(peer, error)
                return 0
        return answer.status.load.num_cold_blocks

    async def _hottest(self, peer: Peer, max_blocks: int) -> tuple[list[PrefixChain], sequence_pb2.KvSource, int]:
        """Return a worker's hottest prefixes, their source, and the bytes of a block."""
        async with self._connect(peer.address) as channel:
            stub = prefix_pb2_grpc.PrefixServiceStub(channel)
            listed = await stub.ListHotPrefixes(prefix_pb2.ListHotPrefixesRequest(max_blocks=max_blocks))
        address = with_port(peer.address, listed.kv_port)
        source = sequence_pb2.KvSource(worker_id=peer.worker_id, address=address, epoch=listed.epoch)
        return chains_from_proto(listed.chains), source, max(1, listed.block_bytes)

    async def _pull(
        self, taker: Peer, source: sequence_pb2.KvSource, chains: Sequence[PrefixChain], deadline_s: float
    ) -> int:
        """Have a worker pull chains; it keeps those that it has when time runs out or the source is lost."""
        time_left_s = deadline_s - asyncio.get_running_loop().time() - min(_ANSWER_S, WARMING_S / 10)
        if not chains or time_left_s <= 0:
            return 0
        right = PullRight(
            puller=WorkerId(taker.worker_id),
            source=WorkerId(source.worker_id),
            epoch=Epoch(source.epoch),
            subject=ANY_CACHED,
        )
        ticketed = sequence_pb2.KvSource(ticket=self._issue(right))
        ticketed.MergeFrom(source)
        request = prefix_pb2.PullPrefixesRequest(
            source=ticketed, chains=chains_to_proto(chains), time_limit_s=time_left_s, max_bytes=_MAX_BYTES
        )
        async with self._connect(taker.address) as channel:
            try:
                pulled = await prefix_pb2_grpc.PrefixServiceStub(channel).PullPrefixes(request)
            except grpc.RpcError as error:
                _log_failure(taker, error)
                return 0
        extra = {"source": source.worker_id, "taker": taker.worker_id, "num_blocks": pulled.num_pulled_blocks}
        logger.info("prefixes moved", extra=extra | {"num_left": pulled.num_left_blocks})
        return pulled.num_pulled_blocks


def _log_failure(peer: Peer, error: Exception) -> None:
    why = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error) or type(error).__name__
    logger.warning("prefixes did not move", extra={"worker_id": peer.worker_id, "reason": why})

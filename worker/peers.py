"""The workers that this one pulls from: channels to them, and a test of whether they can be reached."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc

from common.errors import InvalidRequest, Overloaded
from common.ids import WorkerId
from common.rpc import Connect
from kvrelay.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from kvrelay.v1 import worker_pb2 as pb

MAX_IDLE = 64
"""Unused channels that are kept."""


@dataclass(slots=True, eq=False)
class _Peer:
    address: str
    channel: grpc.aio.Channel
    num_users: int = 0


class PeerChannels:
    """One channel per peer, made when it is first needed. Event loop only. Close with `aclose`.

    The most recently used of the unused channels are kept. A channel in use is closed only when its peer has moved, and
    by `aclose`.
    """

    def __init__(self, connect: Connect, *, max_idle: int = MAX_IDLE) -> None:
        self._connect = connect
        self._max_idle = max_idle
        self._peers: OrderedDict[WorkerId, _Peer] = OrderedDict()
        """Least recently used first."""

    @asynccontextmanager
    async def use(self, worker_id: WorkerId, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yield the channel to a peer. When its address has changed, it was restarted, and calls to the old one end."""
        peer = known = self._peers.get(worker_id)
        if peer is None or peer.address != address:
            peer = self._peers[worker_id] = _Peer(address, self._connect(address))
        peer.num_users += 1  # before the awaits, so that it is not closed by another user
        try:
            if known is not None and known is not peer:
                await known.channel.close(grace=1.0)
            yield peer.channel
        finally:
            peer.num_users -= 1
            if self._peers.get(worker_id) is peer:
                self._peers.move_to_end(worker_id)
            await self._close_idle()

    async def aclose(self) -> None:
        """Close every channel."""
        peers, self._peers = self._peers, OrderedDict()
        for peer in peers.values():
            await peer.channel.close()

    async def _close_idle(self) -> None:
        idle = [worker_id for worker_id, peer in self._peers.items() if not peer.num_users]
        closing = [self._peers.pop(worker_id) for worker_id in idle[: max(0, len(idle) - self._max_idle)]]
        for peer in closing:
            await peer.channel.close()


BOUND_S = 2.0
MAX_PROBES = 4
"""Largest number at the same time."""
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):\d{1,5}")
_MAX_ID_CHARS = 128


class PeerProbe:
    """Probes peers, a few at a time: pulls need a connection between two workers, which a third host cannot see.

    A caller must not learn what else listens at an address. The only results are that the named worker answered, with
    blocks like ours, and that it did not; the second always takes the whole time limit. Event loop only.
    """

    def __init__(self, connect: Connect, *, bound_s: float = BOUND_S) -> None:
        self._connect = connect
        self._bound_s = bound_s
        self._num_running = 0

    async def reach(self, request: pb.ProbePeerRequest, ours: pb.KvLayout) -> pb.ProbePeerResponse:
        """Return whether the named worker answers at that address, with blocks like ours, within the time limit.

        Raises InvalidRequest for a malformed address, Overloaded when `MAX_PROBES` are running.
        """
        if not _HOST_AND_PORT.fullmatch(request.address):
            raise InvalidRequest("must be host:port", field="address")
        if not 0 < len(request.worker_id) <= _MAX_ID_CHARS:
            raise InvalidRequest(f"must have 1 to {_MAX_ID_CHARS} characters", field="worker_id")
        if self._num_running >= MAX_PROBES:
            raise Overloaded(f"{MAX_PROBES} probes are running already", retry_after_s=self._bound_s)
        self._num_running += 1
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            described = await self._describe(request.address)
            round_trip_s = loop.time() - started_s
            if described is None or not _is_peer(described, request.worker_id, ours):
                await asyncio.sleep(self._bound_s - round_trip_s)
                return pb.ProbePeerResponse(reached=False)
        finally:
            self._num_running -= 1
        return pb.ProbePeerResponse(reached=True, round_trip_s=round_trip_s)

    async def _describe(self, address: str) -> kv_transfer_pb2.DescribePagesResponse | None:
        channel = self._connect(f"dns:///{address}")  # with the scheme, so that an address cannot name another one
        try:
            with suppress(grpc.aio.AioRpcError):
                return await kv_transfer_pb2_grpc.KvTransferServiceStub(channel).DescribePages(
                    kv_transfer_pb2.DescribePagesRequest(), timeout=self._bound_s
                )
            return None
        finally:
            await channel.close()


def _is_peer(described: kv_transfer_pb2.DescribePagesResponse, worker_id: str, ours: pb.KvLayout) -> bool:
    return described.worker_id == worker_id and described.layout == ours

"""Channels to the workers that this one pulls from."""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from common.ids import WorkerId
from common.rpc import Connect

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

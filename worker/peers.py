"""Channels to the workers that this one pulls from."""

import grpc

from common.ids import WorkerId
from common.rpc import Connect


class PeerChannels:
    """One channel per peer, made when it is first needed. Event loop only. Close with `aclose`."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._channels: dict[WorkerId, tuple[str, grpc.aio.Channel]] = {}

    async def get(self, peer: WorkerId, address: str) -> grpc.aio.Channel:
        """Return the channel to a peer. A restarted one has another address: calls to the old one are ended."""
        known = self._channels.get(peer)
        if known is not None and known[0] == address:
            return known[1]
        channel = self._connect(address)
        self._channels[peer] = (address, channel)  # before the await: another call must find it
        if known is not None:
            await known[1].close(grace=1.0)
        return channel

    async def aclose(self) -> None:
        """Close every channel."""
        for _address, channel in self._channels.values():
            await channel.close()

"""Channels to other workers: few, and never closed under a call."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

from common.ids import WorkerId
from worker.peers import PeerChannels


class FakeChannel:
    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False

    async def close(self, grace: float | None = None) -> None:
        self.is_closed = True


class Network:
    def __init__(self) -> None:
        self.channels: list[FakeChannel] = []

    def connect(self, address: str) -> Any:
        self.channels.append(FakeChannel(address))
        return self.channels[-1]

    def open_addresses(self) -> list[str]:
        return [channel.address for channel in self.channels if not channel.is_closed]


def use(peers: PeerChannels, name: str) -> AbstractAsyncContextManager[Any]:
    return peers.use(WorkerId(name), name)


async def pull(peers: PeerChannels, *addresses: str) -> None:
    for address in addresses:
        async with use(peers, address):
            pass


async def test_worker_that_pulls_from_many_peers_keeps_the_last_used_channels() -> None:
    network = Network()
    peers = PeerChannels(network.connect, max_idle=3)
    await pull(peers, *"abcab", *(f"new-{number}" for number in range(100)), "a")
    assert network.open_addresses() == ["new-98", "new-99", "a"]
    await pull(peers, "new-98", "new-98")
    assert len(network.channels) == 104
    await peers.aclose()
    assert network.open_addresses() == []


async def test_channel_in_use_is_not_closed_however_many_others_come() -> None:
    network = Network()
    peers = PeerChannels(network.connect, max_idle=1)
    async with use(peers, "busy") as channel:
        await pull(peers, *(f"new-{number}" for number in range(10)))
        async with use(peers, "busy") as same:
            assert same is channel
        assert network.open_addresses() == ["busy", "new-9"]
    assert network.open_addresses() == ["busy"]


async def test_cancelled_call_and_call_at_the_end_of_the_worker_leave_no_channel() -> None:
    network = Network()
    peers = PeerChannels(network.connect, max_idle=0)
    using = asyncio.Event()

    async def pull_for_ever() -> None:
        async with use(peers, "a"):
            using.set()
            await asyncio.Event().wait()

    pulling = asyncio.create_task(pull_for_ever())
    await using.wait()
    pulling.cancel()
    await asyncio.wait([pulling])
    assert network.open_addresses() == []
    async with use(peers, "b"):
        await peers.aclose()
    assert network.open_addresses() == []


async def test_peer_that_has_moved_is_called_at_its_new_address_only() -> None:
    network = Network()
    peers = PeerChannels(network.connect)
    async with peers.use(WorkerId("a"), "old"), peers.use(WorkerId("a"), "new"):
        assert network.open_addresses() == ["new"]
    assert network.open_addresses() == ["new"]
    await peers.aclose()

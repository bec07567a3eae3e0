"""The routers of a cluster: where each is, and what they say of the workers, all together.

Every router is told the workers of its generation by a pusher of its own. What is waited for, that the workers are used
or that nobody is left on one, must hold at every router among those named that serves now: one that is down, or does
not answer for seconds, holds up neither growing nor draining, and learns what it missed when it is back. Where no
router is named, there is nobody to wait for.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NoReturn

from cluster.processes.membership import MembershipPusher
from cluster.processes.plan import ProcessSpec
from common.clock import Clock
from common.config import RouterConfig
from common.ports import dial_address
from common.rpc import Connect
from kvrelay.v1 import router_admin_pb2

MembershipOf = Callable[[str], Sequence[router_admin_pb2.WorkerEndpoint]]
"""Returns what the router of a name is to be told."""


class Routers:
    """All routers. Event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        specs: Sequence[ProcessSpec],
        membership_of: MembershipOf,
        connect: Connect,
        *,
        clock: Clock,
    ) -> None:
        """`specs` are the routers' own; `connect` makes channels to where they are administered."""
        self._config = config
        self._pushed = asyncio.Event()
        self._pushers = {
            spec.name: MembershipPusher(
                partial(membership_of, spec.name), connect, clock=clock, pushed=self._pushed.set
            )
            for spec in specs
        }
        self._addresses = {spec.name: dial_address(spec.host, spec.port) if spec.host else "" for spec in specs}
        self._indices = {spec.name: spec.index for spec in specs}

    @property
    def names(self) -> Collection[str]:
        """All of them."""
        return self._pushers.keys()

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each router, as a client dials it; one on another host has none before it has served."""
        return tuple(address for address in self._addresses.values() if address)

    @property
    def admin_addresses(self) -> tuple[str, ...]:
        """host:port where each router that runs is administered."""
        return tuple(pusher.address for pusher in self._pushers.values() if pusher.address is not None)

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """The same of their HTTP doors; empty without any."""
        return tuple(
            dial_address(address.rpartition(":")[0], self._config.replica(self._indices[name]).http_port or 0)
            for name, address in self._addresses.items()
            if address and self._config.http_port is not None
        )

    def router_changed(self, name: str, address: str | None, admin_address: str | None) -> None:
        """Note where a router serves clients now, and where it is administered; None: it is down."""
        if address is not None:
            self._addresses[name] = _dialled(address)
        self._pushers[name].router_changed(None if admin_address is None else _dialled(admin_address))
        self._pushed.set()

    def worker_changed(self) -> None:
        """Tell every router the membership soon."""
        for pusher in self._pushers.values():
            pusher.worker_changed()

    async def until_ready(self, num_workers: int, *, among: Collection[str]) -> None:
        """Wait until every router among these that serves uses `num_workers` workers."""
        await self._until(lambda pusher: pusher.num_ready >= num_workers, among)

    async def until_used(self, worker_id: str, role: int, *, among: Collection[str]) -> None:
        """Wait until every router among these that serves uses a worker in this role."""
        await self._until(lambda pusher: pusher.uses(worker_id, role), among)

    async def until_empty(self, worker_id: str, *, among: Collection[str]) -> None:
        """Wait until every router among these that serves says that nothing of its own runs on a draining worker."""
        await self._until(lambda pusher: pusher.num_users.get(worker_id) == 0, among)

    async def until_idle(self, name: str) -> None:
        """Have a router refuse new requests, and wait until it has served those that it has."""
        self._pushers[name].send_away()
        await self._until(lambda pusher: pusher.is_idle, [name])

    def num_users(self, worker_id: str) -> int:
        """Return how many requests of all routers ran on a draining worker when they answered last."""
        return sum(pusher.num_users.get(worker_id, 0) for pusher in self._serving(self.names))

    @property
    def leaving(self) -> frozenset[str]:
        """Workers that said themselves to any router that they are about to go."""
        return frozenset().union(*(pusher.leaving for pusher in self._serving(self.names)))

    async def until_leaving_changes(self, known: frozenset[str]) -> frozenset[str]:
        """Return who is leaving once it is somebody else than `known`."""
        while (leaving := self.leaving) == known:
            self._pushed.clear()
            await self._pushed.wait()
        return leaving

    @property
    def num_ready(self) -> int:
        """How many workers every router uses that serves."""
        return self.num_ready_at(self.names) or 0

    def num_ready_at(self, among: Collection[str]) -> int | None:
        """Return how many workers each of these routers uses that serve; None when none of them serves."""
        return min((pusher.num_ready for pusher in self._serving(among)), default=None)

    async def run(self) -> NoReturn:
        """Tell every router until cancelled."""
        await asyncio.gather(*(pusher.run() for pusher in self._pushers.values()))
        raise AssertionError("a pusher ends only when it is cancelled")

    def _serving(self, among: Collection[str]) -> list[MembershipPusher]:
        return [pusher for name, pusher in self._pushers.items() if name in among and pusher.is_serving]

    async def _until(self, holds: Callable[[MembershipPusher], bool], among: Collection[str]) -> None:
        while among and (not (serving := self._serving(among)) or not all(map(holds, serving))):
            self._pushed.clear()
            await self._pushed.wait()


def _dialled(address: str) -> str:
    host, _, port = address.rpartition(":")
    return dial_address(host, int(port))

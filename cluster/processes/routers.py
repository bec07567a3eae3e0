"""Sends every router its workers, and waits for the routers' answers.

Each router has a pusher, which repeats the workers of its generation: at once on every change, every 0.1 s while the
router does not use all of them or one gives requests away, else every second. So a restarted router knows them within
a second.

A condition that is waited for must hold at every router among those named that serves now. A router that is down, or
has not answered for seconds, holds up neither growing nor draining, and learns what it missed when it is back. Without
named routers there is nothing to wait for.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import grpc

from cluster.processes.plan import ProcessSpec
from common.clock import Clock
from common.config import RouterConfig
from common.ports import dial_address
from common.rpc import Connect
from kvrelay.v1 import controller_pb2, router_admin_pb2, router_admin_pb2_grpc

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_HURRY_S = 0.1
_TIMEOUT_S = 2.0
_SILENT_S = 5.0

MembershipOf = Callable[[str], router_admin_pb2.SetWorkersRequest]
"""Returns what the router of that name is told of its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A router's latest answer."""

    num_ready: int = 0
    """Workers that it uses."""
    used: frozenset[tuple[str, int]] = frozenset()
    """Names and wire roles of these workers."""
    num_users: Mapping[str, int] = field(default_factory=dict)
    """Its requests on each draining worker."""
    leaving: frozenset[str] = frozenset()
    """Workers that announced their end to it."""
    worker_health: Sequence[router_admin_pb2.WorkerHealth] = ()
    """How its workers have done lately."""
    is_idle: bool = False
    """Whether it serves no request any more, after it was asked to leave."""
    shortage: str = ""
    """Why requests may not be as long as the model could take; empty: they may."""


class _Pusher:
    """Repeats RouterAdminService.SetWorkers to one router. Event loop only."""

    def __init__(
        self,
        membership: Callable[[], router_admin_pb2.SetWorkersRequest],
        connect: Connect,
        *,
        clock: Clock,
        pushed: Callable[[], None],
        plan: Callable[[], controller_pb2.GetPlanResponse | None],
    ) -> None:
        """`pushed` is called after every attempt; `plan` returns the planner's report to send."""
        self.address: str | None = None
        """Where the router is administered; None while it is down."""
        self.answer = _Answer()
        self._membership = membership
        self._connect = connect
        self._clock = clock
        self._pushed = pushed
        self._plan = plan
        self._changed = asyncio.Event()
        self._reconnect = False
        self._heard_s = 0.0
        self._is_leaving = False

    def push_soon(self) -> None:
        """Push at once, not at the next interval."""
        self._changed.set()

    def router_changed(self, address: str | None) -> None:
        """Push at once on a new connection: the old one may be in its backoff. None: the router is down."""
        self.address = address
        self.answer = _Answer()
        self._is_leaving = False
        self._reconnect = True
        self._heard_s = self._clock.monotonic()
        self._changed.set()

    def send_away(self) -> None:
        """Have the router refuse new requests, until another one takes its place."""
        self._is_leaving = True
        self._changed.set()

    @property
    def is_serving(self) -> bool:
        """Whether its router is up and has answered within the last seconds."""
        return self.address is not None and self._clock.monotonic() - self._heard_s < _SILENT_S

    async def run(self) -> NoReturn:
        """Push until cancelled."""
        channel: grpc.aio.Channel | None = None
        try:
            while True:
                if self._reconnect and channel is not None:
                    await channel.close()
                    channel = None
                self._reconnect = False
                self._changed.clear()
                if self.address is None:
                    await self._changed.wait()
                    continue
                channel = channel or self._connect(self.address)
                is_settled = await self._push(channel)
                # Not wait_for: before Python 3.12 it swallows a cancellation that coincides with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PERIOD_S if is_settled else _HURRY_S):
                        await self._changed.wait()
        finally:
            if channel is not None:
                await channel.close()

    async def _push(self, channel: grpc.aio.Channel) -> bool:
        """Return whether the router uses every worker that it was sent, drains none with requests, and stays."""
        stub = router_admin_pb2_grpc.RouterAdminServiceStub(channel)
        request = self._membership()
        request.MergeFrom(router_admin_pb2.SetWorkersRequest(leaving=self._is_leaving, planner=self._plan()))
        try:
            response = await stub.SetWorkers(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # Normal while the router starts; the next attempt follows within a second.
            logger.debug("cannot send the router its workers: %s", error.code())
            self._pushed()
            return False
        if not self._reconnect:  # else the answer is from a router that is dead by now
            self._heard_s = self._clock.monotonic()
            ready = frozenset(response.ready_worker_ids)
            self.answer = _Answer(
                num_ready=response.num_ready,
                used=frozenset((each.worker_id, each.role) for each in request.workers if each.worker_id in ready),
                num_users=dict(response.num_users),
                leaving=frozenset(response.leaving_worker_ids),
                worker_health=tuple(response.worker_health),
                is_idle=request.leaving and not response.num_requests,
                shortage=response.shortage,
            )
        self._pushed()
        return (
            response.num_ready >= len(request.workers)
            and not any(self.answer.num_users.values())
            and not self._is_leaving
        )


class Routers:
    """All routers of a cluster. Event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        specs: Sequence[ProcessSpec],
        membership_of: MembershipOf,
        connect: Connect,
        *,
        clock: Clock,
    ) -> None:
        """`specs` are those of the routers; `connect` makes channels to their administration."""
        self._config = config
        self._pushed = asyncio.Event()
        self.plan: Callable[[], controller_pb2.GetPlanResponse | None] = lambda: None
        """Returns the planner's report for the routers; set once there is a planner."""
        self._pushers = {
            spec.name: _Pusher(
                partial(membership_of, spec.name),
                connect,
                clock=clock,
                pushed=self._pushed.set,
                plan=lambda: self.plan(),
            )
            for spec in specs
        }
        self._addresses = {spec.name: dial_address(spec.host, spec.port) if spec.host else "" for spec in specs}
        self._indices = {spec.name: spec.index for spec in specs}

    @property
    def names(self) -> Collection[str]:
        """The names of all routers."""
        return self._pushers.keys()

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each router, as a client dials it; a router on another host has none before it has served."""
        return tuple(address for address in self._addresses.values() if address)

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """host:port of their HTTP doors; empty without any."""
        return tuple(
            dial_address(address.rpartition(":")[0], self._config.replica(self._indices[name]).http_port or 0)
            for name, address in self._addresses.items()
            if address and self._config.http_port is not None
        )

    @property
    def admin_addresses(self) -> tuple[str, ...]:
        """host:port of the administration of each router that is up."""
        return tuple(pusher.address for pusher in self._pushers.values() if pusher.address is not None)

    @property
    def num_ready(self) -> int:
        """Workers that every serving router uses."""
        return self.num_ready_at(self.names) or 0

    @property
    def leaving(self) -> frozenset[str]:
        """Workers that announced their end to any router."""
        return frozenset().union(*(pusher.answer.leaving for pusher in self._serving(self.names)))

    @property
    def shortage(self) -> str:
        """Why requests may not be as long as the model could take, as a router says; empty: they may."""
        return next((pusher.answer.shortage for pusher in self._serving(self.names)), "")

    @property
    def worker_health(self) -> list[Sequence[router_admin_pb2.WorkerHealth]]:
        """Health of its workers as each serving router reports it."""
        return [pusher.answer.worker_health for pusher in self._serving(self.names)]

    def num_ready_at(self, among: Collection[str]) -> int | None:
        """Return how many workers each of these routers uses; None if none of them serves."""
        return min((pusher.answer.num_ready for pusher in self._serving(among)), default=None)

    def num_users(self, worker_id: str) -> int:
        """Return the requests of all routers on a draining worker."""
        return sum(pusher.answer.num_users.get(worker_id, 0) for pusher in self._serving(self.names))

    def router_changed(self, name: str, address: str | None, admin_address: str | None) -> None:
        """Note where a router serves clients and is administered; None: it is down."""
        if address is not None:
            self._addresses[name] = _dialled(address)
        self._pushers[name].router_changed(None if admin_address is None else _dialled(admin_address))
        self._pushed.set()

    def worker_changed(self) -> None:
        """Send every router its workers at once."""
        for pusher in self._pushers.values():
            pusher.push_soon()

    async def run(self) -> NoReturn:
        """Send every router its workers, again and again, until cancelled."""
        await asyncio.gather(*(pusher.run() for pusher in self._pushers.values()))
        raise AssertionError("a pusher ends only when it is cancelled")

    async def until_ready(self, num_workers: int, *, among: Collection[str]) -> None:
        """Wait until every serving router among these uses `num_workers` workers."""
        await self._until(lambda answer: answer.num_ready >= num_workers, among)

    async def until_used(self, worker_id: str, role: int, *, among: Collection[str]) -> None:
        """Wait until every serving router among these uses a worker in this wire role."""
        await self._until(lambda answer: (worker_id, role) in answer.used, among)

    async def until_empty(self, worker_id: str, *, among: Collection[str]) -> None:
        """Wait until every serving router among these has no request on a draining worker."""
        await self._until(lambda answer: answer.num_users.get(worker_id) == 0, among)

    async def until_idle(self, name: str) -> None:
        """Have a router refuse new requests, and wait until it has served its own."""
        self._pushers[name].send_away()
        await self._until(lambda answer: answer.is_idle, [name])

    async def until_leaving_changes(self, known: frozenset[str]) -> frozenset[str]:
        """Return the leaving workers once they differ from `known`."""
        while (leaving := self.leaving) == known:
            self._pushed.clear()
            await self._pushed.wait()
        return leaving

    def _serving(self, among: Collection[str]) -> list[_Pusher]:
        return [pusher for name, pusher in self._pushers.items() if name in among and pusher.is_serving]

    async def _until(self, holds: Callable[[_Answer], bool], among: Collection[str]) -> None:
        while among and (not (serving := self._serving(among)) or not all(holds(each.answer) for each in serving)):
            self._pushed.clear()
            await self._pushed.wait()


def _dialled(address: str) -> str:
    host, _, port = address.rpartition(":")
    return dial_address(host, int(port))

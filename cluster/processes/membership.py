"""Tells a router which workers there are, again and again, so that a restarted router learns it within a second.

At once on every change; every 0.1 s while the router does not use all of them, or somebody drains; else every second.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import grpc

from common.clock import Clock
from common.rpc import Connect
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_HURRY_S = 0.1
_TIMEOUT_S = 2.0
_SILENT_S = 5.0

Membership = Callable[[], Sequence[router_admin_pb2.WorkerEndpoint]]


class MembershipPusher:
    """Repeats RouterAdminService.SetWorkers to one router. Event loop only."""

    def __init__(self, membership: Membership, connect: Connect, *, clock: Clock, pushed: Callable[[], None]) -> None:
        """`pushed` is called after every attempt, whatever came of it."""
        self._membership = membership
        self._connect = connect
        self._clock = clock
        self._pushed = pushed
        self._address: str | None = None
        self._changed = asyncio.Event()
        self._reconnect = False
        self._heard_s = 0.0
        self._num_ready = 0
        self._num_users: Mapping[str, int] = {}
        self._used: frozenset[tuple[str, int]] = frozenset()
        """Names and roles of the workers that the router used when it last answered."""
        self._leaving: frozenset[str] = frozenset()
        self._is_going = False
        self._is_idle = False

    def worker_changed(self) -> None:
        """Push soon."""
        self._changed.set()

    def router_changed(self, address: str | None) -> None:
        """Push soon, on a new connection: the old one may be waiting out its backoff. None: the router is down."""
        self._address = address
        self._is_going = self._is_idle = False
        self._reconnect = True
        self._heard_s = self._clock.monotonic()
        self._num_ready, self._num_users, self._used, self._leaving = 0, {}, frozenset(), frozenset()
        self._changed.set()

    def send_away(self) -> None:
        """Have the router refuse new requests from now on, until another one is in its place."""
        self._is_going = True
        self._changed.set()

    @property
    def address(self) -> str | None:
        """Where the router is administered; None while it is down."""
        return self._address

    @property
    def is_idle(self) -> bool:
        """Whether the router, sent away, served no request any more when it last answered."""
        return self._is_idle

    @property
    def is_serving(self) -> bool:
        """Whether its router runs, and was not silent for the last seconds."""
        return self._address is not None and self._clock.monotonic() - self._heard_s < _SILENT_S

    @property
    def num_ready(self) -> int:
        """How many workers the router used when it last answered."""
        return self._num_ready

    @property
    def num_users(self) -> Mapping[str, int]:
        """Requests of this router on each draining worker, as it said last."""
        return self._num_users

    @property
    def leaving(self) -> frozenset[str]:
        """Workers that had said themselves that they are about to go, when the router answered last."""
        return self._leaving

    def uses(self, worker_id: str, role: int) -> bool:
        """Return whether the router used a worker in a role when it last answered."""
        return (worker_id, role) in self._used

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
                if self._address is None:
                    await self._changed.wait()
                    continue
                channel = channel or self._connect(self._address)
                is_content = await self._push(channel)
                # Not wait_for: before Python 3.12 it swallows a cancellation that meets the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PERIOD_S if is_content else _HURRY_S):
                        await self._changed.wait()
        finally:
            if channel is not None:
                await channel.close()

    async def _push(self, channel: grpc.aio.Channel) -> bool:
        """Return whether the router uses every worker that it was told of, and nobody drains or goes."""
        stub = router_admin_pb2_grpc.RouterAdminServiceStub(channel)
        request = router_admin_pb2.SetWorkersRequest(workers=self._membership(), leaving=self._is_going)
        try:
            response = await stub.SetWorkers(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # Normal while the router starts; it gets the membership again within a second.
            logger.debug("router not told: %s", error.code())
            self._pushed()
            return False
        if not self._reconnect:  # else it is a dead router's last word
            self._heard_s = self._clock.monotonic()
            self._num_ready = response.num_ready
            self._is_idle = request.leaving and not response.num_requests
            self._num_users = dict(response.num_users)
            self._leaving = frozenset(response.leaving_worker_ids)
            ready = frozenset(response.ready_worker_ids)
            self._used = frozenset((each.worker_id, each.role) for each in request.workers if each.worker_id in ready)
        self._pushed()
        return response.num_ready >= len(request.workers) and not self._num_users and not self._is_going

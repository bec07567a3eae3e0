"""Tells the router which workers there are, again and again, so that a restarted router learns it within a second.

At once on every change; every 0.1 s while the router does not use all of them, or somebody drains; else every second.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import grpc

from common.rpc import client_channel
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_HURRY_S = 0.1
_TIMEOUT_S = 2.0

Membership = Callable[[], Sequence[router_admin_pb2.WorkerEndpoint]]


class MembershipPusher:
    """Repeats RouterAdminService.SetWorkers. Event loop only."""

    def __init__(self, router_address: str, membership: Membership) -> None:
        self._router_address = router_address
        self._membership = membership
        self._changed = asyncio.Event()
        self._reconnect = False
        self._pushed = asyncio.Condition()
        self._num_ready = 0
        self._num_users: Mapping[str, int] = {}
        """Requests on each draining worker, as the router said last."""

    def worker_changed(self) -> None:
        """Push soon."""
        self._changed.set()

    def router_changed(self) -> None:
        """Push soon, on a new connection: the old one may be waiting out its backoff."""
        self._reconnect = True
        self._changed.set()

    async def until_ready(self, num_workers: int) -> None:
        """Wait until the router answers that it uses `num_workers` workers."""
        async with self._pushed:
            await self._pushed.wait_for(lambda: self._num_ready >= num_workers)

    async def until_empty(self, worker_id: str) -> None:
        """Wait until the router answers that nothing runs on a draining worker."""
        async with self._pushed:
            await self._pushed.wait_for(lambda: self._num_users.get(worker_id) == 0)

    def num_users(self, worker_id: str) -> int:
        """Return how many requests ran on a draining worker when the router answered last."""
        return self._num_users.get(worker_id, 0)

    @property
    def num_ready(self) -> int:
        """How many workers the router used when it last answered."""
        return self._num_ready

    async def run(self) -> NoReturn:
        """Push until cancelled."""
        channel = client_channel(self._router_address)
        try:
            while True:
                if self._reconnect:
                    self._reconnect = False
                    await channel.close()
                    channel = client_channel(self._router_address)
                self._changed.clear()
                is_content = await self._push(channel)
                # Not wait_for: before Python 3.12 it swallows a cancellation that meets the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PERIOD_S if is_content else _HURRY_S):
                        await self._changed.wait()
        finally:
            await channel.close()

    async def _push(self, channel: grpc.aio.Channel) -> bool:
        """Return whether the router uses every worker that it was told of, and nobody drains."""
        stub = router_admin_pb2_grpc.RouterAdminServiceStub(channel)
        request = router_admin_pb2.SetWorkersRequest(workers=self._membership())
        try:
            response = await stub.SetWorkers(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # Normal while the router starts; it gets the membership again within a second.
            logger.debug("router not told: %s", error.code())
            return False
        async with self._pushed:
            self._num_ready = response.num_ready
            self._num_users = dict(response.num_users)
            self._pushed.notify_all()
        return response.num_ready >= len(request.workers) and not self._num_users

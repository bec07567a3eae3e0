"""Serves a worker's runtime, one listener for each audience: control, KV plane, and the direct door of clients."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from common.metrics_server import MetricsServer
from common.ports import address_of, listen_on_first
from common.rpc_server import MAX_MESSAGE_BYTES, Server, start_server
from common.trust.access import Audience
from common.trust.credentials import Credentials
from common.trust.doors import door_of, scrape_tls
from common.trust.guard import Guard
from common.watchdog import Watchdog
from common.wire_names import ROLE_NAMES
from kvrelay.v1 import kv_transfer_pb2_grpc, prefix_pb2_grpc, worker_pb2_grpc
from worker.metrics import registry_of
from worker.prefix_service import PrefixService
from worker.runtime import ServedPorts, WorkerRuntime
from worker.service import UPDATE_GAP_S, WorkerService
from worker.step_watch import step_watch_of

logger = logging.getLogger(__name__)

_DIRECT_MESSAGE_BYTES = 64 << 10
"""Largest request at the direct door, which any client may send: a capability and a few numbers."""
_CALLS_GRACE_S = 5.0
"""Time for calls that still run after `take_leave`."""


class Plane(Enum):
    """Listeners of a worker, in the order in which they start."""

    KV = Audience.INSIDERS, "pulls by other workers"
    DIRECT = Audience.CLIENTS, "tokens for clients"
    CONTROL = Audience.INSIDERS, "routers, the controller, operators"


@dataclass(frozen=True, slots=True)
class PlaneService:
    """A gRPC service and its listener."""

    plane: Plane
    register: Callable[[Any, grpc.aio.Server], None]
    """Generated: add_NameServicer_to_server."""
    servicer: object

    @property
    def name(self) -> str:
        """Full name of the service."""
        return f"kvrelay.v1.{self.register.__name__.removeprefix('add_').removesuffix('Servicer_to_server')}"

    def add(self, server: grpc.aio.Server) -> None:
        """Let a server serve it."""
        self.register(self.servicer, server)


MakeServices = Callable[[WorkerRuntime], Sequence[PlaneService]]
"""Makes the services of the pools; every worker has the common ones as well."""


def common_services(runtime: WorkerRuntime, *, update_gap_s: float = UPDATE_GAP_S) -> list[PlaneService]:
    """Return the services of every worker. `update_gap_s`: the shortest time between two updates of a watcher."""
    worker_service = WorkerService(runtime, update_gap_s=update_gap_s)
    prefix_service, transfer_service = PrefixService(runtime), runtime.transfer_service()
    return [
        PlaneService(Plane.CONTROL, worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker_service),
        PlaneService(Plane.CONTROL, prefix_pb2_grpc.add_PrefixServiceServicer_to_server, prefix_service),
        PlaneService(Plane.KV, kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server, transfer_service),
    ]


SETTLE_S = 2.5
"""Idle time after which a leaving worker may end. Requests that routers sent before they learned of it arrive within
it, and the controller, which asks routers every second, begins to move prefixes."""


async def take_leave(runtime: WorkerRuntime, *, grace_s: float) -> None:
    """Announce the end, so that routers move the running answers, and return when the worker may end.

    It may end when it has been idle for `SETTLE_S`; or when no router listens, so that nothing would be moved; or after
    `grace_s`, and routers resume what is left from its tokens. The last worker of its pool still gets requests, and
    serves them until then.
    """
    runtime.announce_leaving()
    logger.info("leaving", extra={"grace_s": grace_s, "num_tasks": runtime.num_request_tasks})
    reasons = [asyncio.ensure_future(reason) for reason in (_until_quiet(runtime), runtime.hub.until_unwatched())]
    try:
        done, _running = await asyncio.wait(reasons, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for reason in reasons:
            reason.cancel()
        await asyncio.wait(reasons)
    if not done:
        logger.warning("leaving before every answer has moved", extra={"num_tasks": runtime.num_request_tasks})


async def _until_quiet(runtime: WorkerRuntime) -> None:
    """Wait until the worker has been idle for `SETTLE_S`. Prefixes are pulled in pieces, with pauses between them."""
    calls = runtime.calls
    while True:
        await calls.until_idle()
        num_begun = calls.num_begun
        await asyncio.sleep(SETTLE_S)
        if calls.is_idle and calls.num_begun == num_begun:
            return


@dataclass(slots=True)
class RunningWorker:
    """A worker that serves."""

    runtime: WorkerRuntime
    servers: dict[Plane, Server]
    registry: CollectorRegistry
    """Its metrics, served or not."""
    metrics: MetricsServer | None
    watchdog: Watchdog
    """Ends the process when its engine or event loop hangs, once started."""
    host: str

    @property
    def address(self) -> str:
        """Control address for routers and the controller, host:port."""
        return address_of(self.host, self.servers[Plane.CONTROL].port)

    @property
    def kv_address(self) -> str:
        """Address for pulls by other workers, host:port."""
        return address_of(self.host, self.runtime.ports.kv)

    @property
    def admin_address(self) -> str:
        """Address for the controller, host:port."""
        return self.address

    @property
    def role(self) -> str:
        """Name of its current role."""
        return ROLE_NAMES[self.runtime.role]

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus metrics; 0 when off."""
        return self.runtime.ports.metrics

    async def stop(self, grace_s: float) -> None:
        """Take leave, refuse new work and let running calls end, all within `grace_s` seconds; free everything.

        With 0 it ends at once, without an announcement.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + grace_s
        if grace_s > 0:
            await take_leave(self.runtime, grace_s=grace_s)
        self.runtime.hub.close()
        for drain in self.runtime.on_drain:
            drain()
        left_s = min(_CALLS_GRACE_S, max(0.0, end_s - loop.time()))
        await asyncio.gather(*(server.stop(left_s) for server in self.servers.values()))
        await self.runtime.aclose()
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.close)


async def start_worker(
    runtime: WorkerRuntime, make_services: MakeServices, credentials: Credentials, *, host: str, port: int
) -> RunningWorker:
    """Start a runtime and serve it; `port` is the control port; 0: one of its pool's ports. Raises OSError if taken."""
    services = [*common_services(runtime), *make_services(runtime)]
    ports = runtime.pool_config.port_range
    servers: dict[Plane, Server] = {}
    async with AsyncExitStack() as undoing:
        registry, metrics = registry_of(runtime), None
        watchdog = Watchdog.of_this_process(step_watch_of(runtime).look)
        if runtime.pool_config.metrics:
            serve = partial(MetricsServer, registry, host=host, tls=scrape_tls(credentials), watchdog=watchdog)
            metrics = listen_on_first(ports, lambda port: serve(port=port))
            undoing.push_async_callback(asyncio.to_thread, metrics.close)
        runtime.start()
        undoing.push_async_callback(runtime.aclose)
        for plane in Plane:
            audience, _what = plane.value
            door = door_of(runtime.config.tls, credentials) if plane is Plane.DIRECT else None
            servers[plane] = await start_server(
                _adding([service for service in services if service.plane is plane]),
                host=host,
                port=port if port and plane is Plane.CONTROL else ports,
                guard=Guard(credentials, audience, door=door),
                max_message_bytes=_DIRECT_MESSAGE_BYTES if plane is Plane.DIRECT else MAX_MESSAGE_BYTES,
            )
            undoing.push_async_callback(servers[plane].stop, 0)
        undoing.pop_all()
    runtime.ports = ServedPorts(
        kv=servers[Plane.KV].port,
        direct=servers[Plane.DIRECT].port,
        metrics=metrics.port if metrics is not None else 0,
    )
    logger.info(
        "serving",
        extra={
            "worker_id": runtime.worker_id,
            "role": ROLE_NAMES[runtime.role],
            "port": servers[Plane.CONTROL].port,
            "epoch": runtime.epoch,
            "num_blocks": runtime.executor.kv.num_blocks,
        },
    )
    return RunningWorker(
        runtime=runtime, servers=servers, registry=registry, metrics=metrics, watchdog=watchdog, host=host
    )


def _adding(services: Sequence[PlaneService]) -> Callable[[grpc.aio.Server], list[str]]:
    def add(server: grpc.aio.Server) -> list[str]:
        for service in services:
            service.add(server)
        return [service.name for service in services]

    return add

"""A router in front of real workers with fake engines, or given ones, over real gRPC, all in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from common.config import ServingConfig, parse_config
from common.trust.identity import Role
from engine.executor import Executor
from kvrelay.client import AsyncClient
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc, worker_pb2
from router.codec import ByteCodec
from router.server import RunningRouter, serve_router
from tests.trust import as_controller_of_router, credentials_of
from tests.worker.cluster import make_runtime, serve_runtime
from worker.serving import RunningWorker

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class System:
    """A running system."""

    router: RunningRouter
    workers: dict[str, RunningWorker]
    address: str
    admin: "router_admin_pb2_grpc.RouterAdminServiceAsyncStub"
    endpoints: list[router_admin_pb2.WorkerEndpoint]

    def client(self, **options: Any) -> AsyncClient:
        return AsyncClient(self.address, timeout_s=30, **options)

    async def kill(self, worker_id: str) -> None:
        """Break every connection of a worker, as its death would."""
        for server in self.workers[worker_id].servers.values():
            await server.grpc_server.stop(None)

    async def kill_router(self) -> None:
        """Break every connection of its clients, and so end what it runs at the workers, as a crash would."""
        await self.router.server.grpc_server.stop(None)

    async def drain(self, *worker_ids: str) -> dict[str, int]:
        """Send the router the workers and which of them drain; returns how many requests run on each that drains."""
        request = router_admin_pb2.SetWorkersRequest(workers=self.endpoints)
        for endpoint in request.workers:
            endpoint.draining = endpoint.worker_id in worker_ids
        return dict((await self.admin.SetWorkers(request)).num_users)

    async def until_idle(self) -> None:
        """Wait until no living worker and no router holds anything."""
        async with asyncio.timeout(TIMEOUT_S), self.client() as client:
            while True:
                status = await client.status()
                held = status.router.num_active + status.router.num_bookings + status.router.num_request_tasks
                for view in status.workers:
                    if view.status is not None:
                        held += view.status.num_used_blocks + view.status.num_request_tasks + view.status.num_leases
                if not held:
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_system(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    router: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    load: Callable[[], Executor] | None = None,
    **fake: Any,
) -> AsyncIterator[System]:
    """Start everything and wait until the router uses every worker.

    `fake` shapes the engines (make_runtime); with `load` each worker has an engine that it returns.
    """
    async with AsyncExitStack() as stack:
        running, admin = await stack.enter_async_context(_serving_router(router, model))
        endpoints, workers = [], {}
        for role, name, count in ((PREFILL, "p", num_prefill), (DECODE, "d", num_decode)):
            for i in range(count):
                runtime = make_runtime(
                    role, f"{name}{i}", transports=("grpc",), executor=load() if load else None, **fake
                )
                worker = workers[f"{name}{i}"] = await serve_runtime(runtime)
                stack.push_async_callback(worker.stop, 0)
                endpoints.append(
                    router_admin_pb2.WorkerEndpoint(worker_id=f"{name}{i}", role=role, address=worker.address)
                )
        await _until_used(running, admin, endpoints)
        yield System(router=running, workers=workers, address=running.address, admin=admin, endpoints=endpoints)


@asynccontextmanager
async def another_router(system: System, *, router: dict[str, Any] | None = None) -> AsyncIterator[System]:
    """Put one more router in front of the workers of a system; yields the system as that router has it."""
    async with _serving_router(router) as (running, admin):
        await _until_used(running, admin, system.endpoints)
        yield replace(system, router=running, address=running.address, admin=admin)


@asynccontextmanager
async def _serving_router(
    router: dict[str, Any] | None, model: dict[str, Any] | None = None
) -> "AsyncIterator[tuple[RunningRouter, router_admin_pb2_grpc.RouterAdminServiceAsyncStub]]":
    # The engines share this process: on a busy machine it is silent for seconds.
    options = {"recovery_timeout_s": 5.0, "http_port": None, "silence_s": 10.0, **(router or {})}
    sections = {"model": {"engine": "fake", **(model or {})}, "router": options}
    config: ServingConfig = parse_config(sections, source="test")
    running = await serve_router(
        config, credentials_of(Role.ROUTER, "router-0"), codec=ByteCodec(), host="127.0.0.1", port=0
    )
    channel = as_controller_of_router(running.admin_address)
    try:
        yield running, router_admin_pb2_grpc.RouterAdminServiceStub(channel)
    finally:
        await channel.close()
        await running.stop(0)


async def _until_used(
    running: RunningRouter,
    admin: "router_admin_pb2_grpc.RouterAdminServiceAsyncStub",
    endpoints: list[router_admin_pb2.WorkerEndpoint],
) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while running.fleet.count_ready() < len(endpoints):
            await admin.SetWorkers(router_admin_pb2.SetWorkersRequest(workers=endpoints))
            await asyncio.sleep(0.005)

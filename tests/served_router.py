"""A router in this process, as its controller and its clients see it; the clusters of tests add workers to it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from common.config import ServingConfig
from common.trust.identity import Role
from kvrelay.client import AsyncClient
from kvrelay.v1 import inference_pb2, router_admin_pb2, router_admin_pb2_grpc
from router.diagnosis.status import StatusReporter
from router.reading.codec import ByteCodec
from router.server import RunningRouter, serve_router
from tests.trust import as_controller_of_router, credentials_of, operator_token

TIMEOUT_S = 60.0
_LOOK_S = 0.001
"""Time between two looks at what no event tells."""


@dataclass(slots=True, eq=False, kw_only=True)
class ServedRouter:
    """A running router."""

    router: RunningRouter
    admin: "router_admin_pb2_grpc.RouterAdminServiceAsyncStub"

    @property
    def address(self) -> str:
        """Address of its gRPC door."""
        return self.router.address

    def client(self, **options: Any) -> AsyncClient:
        return AsyncClient(self.address, timeout_s=TIMEOUT_S, **options)

    def operator(self) -> AsyncClient:
        return self.client(api_key=operator_token())

    async def use(
        self, workers: Sequence[router_admin_pb2.WorkerEndpoint], *, draining: Container[str] = ()
    ) -> router_admin_pb2.SetWorkersResponse:
        """Send the router its workers and which of them drain, as a controller does."""
        request = router_admin_pb2.SetWorkersRequest(workers=workers)
        for endpoint in request.workers:
            endpoint.draining = endpoint.worker_id in draining
        return await self.admin.SetWorkers(request)

    async def until_used(self, workers: Sequence[router_admin_pb2.WorkerEndpoint]) -> None:
        """Send the router its workers and wait until all of them are ready."""
        await self.use(workers)
        await self.until(lambda _router: self.router.fleet.count_ready() >= len(workers))

    async def until(self, condition: Callable[[inference_pb2.RouterStatus], object]) -> inference_pb2.RouterStatus:
        """Wait until a condition holds, given the status of the router, and return that status."""
        reporter = StatusReporter(self.router.door.parts)
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(router := reporter.router()):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(_LOOK_S)
        return router


@asynccontextmanager
async def serving_router(config: ServingConfig, *, host: str = "127.0.0.1") -> AsyncIterator[ServedRouter]:
    """Serve a router of the fake engine on free ports of a host for the duration of the block."""
    running = await serve_router(config, credentials_of(Role.ROUTER, "router-0"), codec=ByteCodec(), host=host, port=0)
    channel = as_controller_of_router(running.admin_address)
    try:
        yield ServedRouter(router=running, admin=router_admin_pb2_grpc.RouterAdminServiceStub(channel))
    finally:
        await channel.close()
        await running.stop(0)

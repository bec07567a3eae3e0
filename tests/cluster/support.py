"""Builders and a scripted router for the tests of cluster/."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from cluster.processes.launch_local import Command
from cluster.processes.plan import ProcessRole, ProcessSpec
from common.config import ServingConfig
from common.rpc_server import start_server
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc
from tests.trust import router_guard

FAKE_SERVICE = Path(__file__).with_name("fake_service.py")


def make_config(**changes: object) -> ServingConfig:
    return ServingConfig.model_validate({"launcher": "local", "model": {"engine": "fake"}, **changes})


def make_spec(name: str, role: ProcessRole = ProcessRole.DECODE) -> ProcessSpec:
    return ProcessSpec(name=name, role=role, host="127.0.0.1", port=0)


def fake_command(*, routers: Sequence[str] = (), modes: dict[str, Sequence[str]] | None = None) -> Command:
    """Return a Command that starts fake services: routers report these addresses, workers one made of their name."""

    def command(spec: ProcessSpec) -> list[str]:
        address = routers[spec.index] if spec.role is ProcessRole.ROUTER else f"{spec.name}.invalid:1"
        return [sys.executable, str(FAKE_SERVICE), address, *(modes or {}).get(spec.name, ())]

    return command


Worker = tuple[str, int, str]


class RecordingRouter(router_admin_pb2_grpc.RouterAdminServiceServicer):
    """Records the last membership, and lets tests wait for one."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.num_unused = 0
        """Members that it reports as not used yet."""
        self.unused: set[str] = set()
        """Members that it refuses."""
        self.num_users: dict[str, int] = {}
        """Its reported requests on draining workers."""
        self.draining: set[str] = set()
        self.num_requests = 0
        """Its reported requests."""
        self.shortage = ""
        """What it reports of its workers' pages."""
        self.is_leaving = False
        """Whether it was last told to leave."""
        self.is_without_prefill = False
        """Whether it was last told that there is no prefill worker."""
        self.planner_mode = ""
        """What it was last told of the planner."""
        self.num_pushes = 0
        self._pushed = asyncio.Condition()

    async def SetWorkers(
        self,
        request: router_admin_pb2.SetWorkersRequest,
        context: grpc.aio.ServicerContext[router_admin_pb2.SetWorkersRequest, router_admin_pb2.SetWorkersResponse],
    ) -> router_admin_pb2.SetWorkersResponse:
        async with self._pushed:
            self.workers = [(each.worker_id, each.role, each.address) for each in request.workers]
            self.draining = {each.worker_id for each in request.workers if each.draining}
            self.is_leaving = request.leaving
            self.is_without_prefill = request.without_prefill
            self.planner_mode = request.planner.mode
            self.num_pushes += 1
            self._pushed.notify_all()
        accepted = [name for name, _role, _address in self.workers if name not in self.unused]
        ready = accepted[: len(accepted) - self.num_unused]
        return router_admin_pb2.SetWorkersResponse(
            num_ready=len(ready),
            num_users=self.num_users,
            num_requests=self.num_requests,
            ready_worker_ids=ready,
            shortage=self.shortage,
        )

    async def until(self, condition: Callable[["RecordingRouter"], bool], *, timeout_s: float = 60.0) -> None:
        """Wait until `condition` holds after a push, or now."""
        async with asyncio.timeout(timeout_s), self._pushed:
            await self._pushed.wait_for(lambda: condition(self))


@asynccontextmanager
async def recording_router() -> AsyncIterator[tuple[RecordingRouter, int]]:
    """Serve a RecordingRouter on a free port."""
    router = RecordingRouter()  # type: ignore[abstract]  # it has no demand

    def add(server: grpc.aio.Server) -> list[str]:
        router_admin_pb2_grpc.add_RouterAdminServiceServicer_to_server(router, server)
        return [router_admin_pb2.DESCRIPTOR.services_by_name["RouterAdminService"].full_name]

    server = await start_server(add, host="127.0.0.1", port=0, guard=router_guard())
    try:
        yield router, server.port
    finally:
        await server.stop(0)

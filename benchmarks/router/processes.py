"""A router as it is deployed, workers behind it that compute nothing, and how clients connect to them."""

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import grpc
import yaml

from benchmarks.router.children import HOST, Child, running_child
from benchmarks.router.workers import ROLES, worker_id_of
from common.ports import with_port
from common.rpc import client_channel
from common.trust.authority import Authority
from common.trust.channels import Reach
from common.trust.credentials import Credentials
from common.trust.identity import Role
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc, worker_pb2, worker_pb2_grpc

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorkers:
    """Workers that run in one process."""

    pid: int
    endpoints: Sequence[router_admin_pb2.WorkerEndpoint]


@asynccontextmanager
async def running_workers(authority: Authority, num_workers: int, *, itl_ms: float) -> AsyncIterator[RunningWorkers]:
    """Run workers until the block is left; the first one decodes, the next prefills, and so on."""
    command = ("benchmarks.router.workers", str(num_workers), "--itl-ms", str(itl_ms))
    async with running_child(authority, *command, role=Role.WORKER, name=worker_id_of(0)) as child:
        endpoints = [
            router_admin_pb2.WorkerEndpoint(
                worker_id=worker_id_of(number), role=ROLES[number % 2], address=f"{HOST}:{port}"
            )
            for number, port in enumerate(child.line.split())
        ]
        yield RunningWorkers(pid=child.pid, endpoints=endpoints)


async def direct_door_of(authority: Authority, address: str) -> str:
    """Return the direct door of a worker by its control."""
    async with controller(authority).worker(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        described = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest())
    return with_port(address, described.direct_port)


@asynccontextmanager
async def running_router(
    authority: Authority, workers: Sequence[router_admin_pb2.WorkerEndpoint], section: Mapping[str, Any]
) -> AsyncIterator[Child]:
    """Run a router with these workers until the block is left; yields it when all of them are ready.

    `section` adds to its section of serving.yaml.
    """
    config = {"model": {"engine": "fake"}, "router": {"port": 0, "metrics_port": None, **section}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serving.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = ("router", "--config", str(path), "--die-with-parent")
        async with running_child(authority, *command, role=Role.ROUTER, name="router-0") as router:
            address, request = router.ready.admin_address, router_admin_pb2.SetWorkersRequest(workers=workers)
            async with controller(authority).router(address) as channel, asyncio.timeout(_START_TIMEOUT_S):
                admin = router_admin_pb2_grpc.RouterAdminServiceStub(channel)
                while (await admin.SetWorkers(request)).num_ready < len(workers):  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.05)
            yield router


def controller(authority: Authority) -> Reach:
    """Return how the benchmark calls its processes, as their controller."""
    return Reach.of(Credentials.of(authority, Role.CONTROLLER, "controller"))


class ConnectDoor(Protocol):
    """Makes a client's channels to doors."""

    def __call__(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        """Return a channel to host:port; `server_name` is the DNS name in its certificate, "" for the host."""
        ...


def client_of(authority: Authority) -> ConnectDoor:
    """Return what makes a client's channels to doors."""
    tls = grpc.ssl_channel_credentials(authority.ca_pem) if authority.settings.is_encrypted else None
    return lambda address, server_name="": client_channel(address, tls, server_name=server_name)


def http_session_of(authority: Authority) -> aiohttp.ClientSession:
    """Return an HTTP client without limits, to which these doors are known."""
    tls: ssl.SSLContext | bool = True
    if authority.settings.is_encrypted:
        tls = ssl.create_default_context(cadata=authority.ca_pem.decode())
    connector = aiohttp.TCPConnector(limit=0, ssl=tls)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

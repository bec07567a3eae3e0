"""A worker and a router with real listeners, plain or TLS, and callers of every kind."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.worker_process.server import pool_services
from common.config import parse_config
from common.trust.authority import Authority, AuthoritySettings
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.identity import Role
from kvrelay.v1 import worker_pb2
from router.reading.codec import ByteCodec
from router.server import RunningRouter, serve_router
from tests.worker.cluster import make_runtime
from worker.environment import Environment
from worker.serving import RunningWorker, start_worker

HOSTS = ("127.0.0.1", "localhost")


def authority(*, is_encrypted: bool, cluster: str = "test", lifetime_s: float = 3600.0) -> Authority:
    """Return a new authority."""
    settings = AuthoritySettings(cluster=cluster, is_encrypted=is_encrypted, lifetime_s=lifetime_s)
    return Authority.new(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Listeners to attack."""

    authority: Authority
    worker: RunningWorker
    router: RunningRouter

    def credentials(self, role: Role, name: str = "somebody") -> Credentials:
        """Return credentials of this cluster."""
        return Credentials.of(self.authority, role, name, HOSTS)

    def channel(self, address: str, served_by: Role, caller: Credentials) -> grpc.aio.Channel:
        """Return a channel of a caller to a listener of a process of that role."""
        return connect_to(served_by, caller)(address)

    @property
    def inside(self) -> dict[str, tuple[str, Role]]:
        """Address and role of the server of every inside listener."""
        return {
            "control": (self.worker.address, Role.WORKER),
            "kv": (self.worker.kv_address, Role.WORKER),
            "admin": (self.router.admin_address, Role.ROUTER),
        }

    @property
    def doors(self) -> dict[str, str]:
        """Address of every gRPC listener for clients."""
        host = self.worker.host
        return {"door": self.router.address, "direct": f"{host}:{self.worker.runtime.ports.direct}"}


@asynccontextmanager
async def listeners(*, is_encrypted: bool) -> AsyncIterator[Listeners]:
    """Serve one prefill worker with a fake engine, and a router that knows no workers."""
    own = authority(is_encrypted=is_encrypted)
    async with AsyncExitStack() as stack:
        mine = Credentials.of(own, Role.WORKER, "prefill-0", HOSTS)
        runtime = make_runtime(
            worker_pb2.WORKER_ROLE_PREFILL, "prefill-0", transports=("grpc",), environment=Environment.real(mine)
        )
        worker = await start_worker(runtime, pool_services, mine, host="127.0.0.1", port=0)
        stack.push_async_callback(worker.stop, 0)
        config = parse_config({"model": {"engine": "fake"}, "router": {"metrics_port": None}}, source="test")
        credentials = Credentials.of(own, Role.ROUTER, "router-0", HOSTS)
        router = await serve_router(config, credentials, codec=ByteCodec(), host="127.0.0.1", port=0)
        stack.push_async_callback(router.stop, 0)
        yield Listeners(authority=own, worker=worker, router=router)


async def status_of(
    channel: grpc.aio.Channel, method: str, message: bytes = b"", *, timeout_s: float = 60.0
) -> tuple[grpc.StatusCode, str]:
    """Return how a call of any kind ends that sends one message."""
    raw: Any = channel.unary_stream(method)  # on the wire all kinds are alike
    call = raw(message, timeout=timeout_s)
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()

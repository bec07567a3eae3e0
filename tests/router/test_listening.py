"""A router on addresses of either family, and behind the proxy of an environment."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from common.config import ServingConfig
from common.metrics_server import MetricsServer
from common.ports import dial_address
from common.rpc import client_channel
from common.trust.identity import Role
from kvrelay.client import AsyncClient, Client
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc
from router.codec import ByteCodec
from router.server import RunningRouter, serve_router
from tests.router.fake_worker import TIMEOUT_S
from tests.router.fakes import config_with
from tests.trust import as_controller_of_router, credentials_of

PROXY_ENVS = ("http_proxy", "https_proxy", "grpc_proxy")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


async def serving_on(host: str) -> RunningRouter:
    config = ServingConfig(router=config_with(http_port=0, metrics_port=0))
    return await serve_router(config, credentials_of(Role.ROUTER, "router-0"), codec=ByteCodec(), host=host, port=0)


@pytest.fixture(params=["127.0.0.1", "localhost", *(pytest.param(each, marks=needs_ipv6) for each in ("::1", "[::1]"))])
async def router(request: pytest.FixtureRequest) -> AsyncIterator[RunningRouter]:
    router = await serving_on(request.param)
    yield router
    await router.stop(0)


async def test_every_listener_of_a_router_answers_on_its_host(router: RunningRouter) -> None:
    host = router.address.rpartition(":")[0].strip("[]")
    async with asyncio.timeout(TIMEOUT_S):
        async with AsyncClient(router.address) as client:
            assert (await client.status()).router.http_port == router.http_port
        async with as_controller_of_router(router.admin_address) as admin:
            stub = router_admin_pb2_grpc.RouterAdminServiceStub(admin)
            await stub.GetDemand(router_admin_pb2.GetDemandRequest(window_s=1))
        for port in (router.http_port, router.metrics_port):
            _reader, writer = await asyncio.open_connection(host, port)
            writer.close()


@needs_ipv6
def test_metrics_of_a_host_without_ipv4_are_served() -> None:
    server = MetricsServer(CollectorRegistry(), host="::1", port=0)
    socket.create_connection(("::1", server.port), timeout=TIMEOUT_S).close()
    server.close()


@pytest.mark.parametrize(
    ("host", "address"),
    [("::", "[::1]:7"), ("[::1]", "[::1]:7"), ("2001:db8::1", "[2001:db8::1]:7"), ("0.0.0.0", "127.0.0.1:7")],
)
def test_address_to_dial_has_brackets_where_a_colon_would_mislead(host: str, address: str) -> None:
    assert dial_address(host, 7) == address


async def test_companys_proxy_is_no_way_to_a_router_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:  # accepts, and never answers
        for name in PROXY_ENVS:
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        router = await serving_on("127.0.0.1")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async with AsyncClient(router.address) as client:
                    await client.status()
                async with as_controller_of_router(router.admin_address) as admin:
                    stub = router_admin_pb2_grpc.RouterAdminServiceStub(admin)
                    await stub.GetDemand(router_admin_pb2.GetDemandRequest(window_s=1))
                await asyncio.to_thread(_ask, router.address)
        finally:
            await router.stop(0)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def _ask(address: str) -> None:
    with Client(address) as client:
        client.status(timeout_s=TIMEOUT_S)


async def test_cluster_of_another_network_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        for name in PROXY_ENVS:
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        async with client_channel("router.example:50051") as channel:
            channel.get_state(try_to_connect=True)
            async with asyncio.timeout(TIMEOUT_S):
                connection, _ = await asyncio.get_running_loop().sock_accept(proxy)
                first = await asyncio.get_running_loop().sock_recv(connection, 1024)
            connection.close()
    assert first.startswith(b"CONNECT router.example:50051")

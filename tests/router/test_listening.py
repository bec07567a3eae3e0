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
from kvrelay.client import Client
from kvrelay.v1 import router_admin_pb2
from tests.router.fakes import config_with
from tests.served_router import TIMEOUT_S, ServedRouter, serving_router

PROXY_ENVS = ("http_proxy", "https_proxy", "grpc_proxy")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


CONFIG = ServingConfig(router=config_with(http_port=0, metrics_port=0))


@pytest.fixture(params=["127.0.0.1", "localhost", *(pytest.param(each, marks=needs_ipv6) for each in ("::1", "[::1]"))])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[ServedRouter]:
    async with serving_router(CONFIG, host=request.param) as served:
        yield served


async def ask_as_everybody(served: ServedRouter) -> None:
    """Call the router's gRPC doors, as a client and as its controller do."""
    async with served.client() as client:
        assert (await client.status()).router.http_port == served.router.http_port
    await served.admin.GetDemand(router_admin_pb2.GetDemandRequest(window_s=1))


async def test_every_listener_of_a_router_answers_on_its_host(served: ServedRouter) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await ask_as_everybody(served)
        for port in (served.router.http_port, served.router.metrics_port):
            _reader, writer = await asyncio.open_connection(served.address.rpartition(":")[0].strip("[]"), port)
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
        async with asyncio.timeout(TIMEOUT_S), serving_router(CONFIG) as served:
            await ask_as_everybody(served)
            await asyncio.to_thread(_ask, served.address)
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

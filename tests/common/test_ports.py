"""Choice of free ports, and names of hosts."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from common.ports import free_port, listen_on_first, names_of
from common.rpc_server import start_server
from common.trust.authority import MAX_NAMES
from tests.trust import worker_guard

_MOST_TLS_NAMES = 32
"""Most entries of tls.names."""


def listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_error_names_the_ports_when_all_are_taken() -> None:
    with listen(0) as one, listen(0) as other:
        ports = [int(each.getsockname()[1]) for each in (one, other)]
        with pytest.raises(OSError, match=f"none of the ports {ports[0]} to {ports[1]} is free"):
            listen_on_first(ports, listen)


async def test_restarted_server_gets_its_first_free_port_again() -> None:
    with listen(0) as taken:
        ports = (int(taken.getsockname()[1]), free_port("127.0.0.1"))
        for _ in range(2):  # like a restarted worker
            server = await start_server(lambda _server: [], host="127.0.0.1", port=ports, guard=worker_guard())
            assert server.port == ports[1]
            await server.stop(0)


def test_names_of_a_host_with_hundreds_of_interfaces_fit_a_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    veths = [SimpleNamespace(family=socket.AF_INET6, address=f"fe80::{i:x}%veth{i}") for i in range(1, 300)]
    bridges = [SimpleNamespace(family=socket.AF_INET, address=f"172.17.{i}.1") for i in range(100)]
    own = SimpleNamespace(family=socket.AF_INET, address="10.0.0.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [own], "veth": veths, "br": bridges})

    names = names_of("0.0.0.0")

    assert "10.0.0.7" in names
    assert not any(name.startswith("fe80") for name in names)
    assert len(names) + _MOST_TLS_NAMES <= MAX_NAMES

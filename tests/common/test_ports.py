"""Ports: the first free one of some."""

import socket

import pytest

from common.ports import free_port, listen_on_first
from common.rpc import start_server


def listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_listen_on_first_takes_the_first_free_port() -> None:
    with listen(0) as taken:
        port = int(taken.getsockname()[1])
        with listen_on_first((port, 0), listen) as listening:
            assert listening.getsockname()[1] not in (0, port)


def test_listen_on_first_when_all_are_taken_names_them() -> None:
    with listen(0) as one, listen(0) as other:
        ports = [int(each.getsockname()[1]) for each in (one, other)]
        with pytest.raises(OSError, match=f"none of the ports {ports[0]} to {ports[1]} is free"):
            listen_on_first(ports, listen)


async def test_server_on_several_ports_takes_the_first_free_one_and_leaves_it() -> None:
    with listen(0) as taken:
        ports = (int(taken.getsockname()[1]), free_port("127.0.0.1"))
        for _ in range(2):  # as a worker that is restarted
            server = await start_server(lambda _server: [], host="127.0.0.1", port=ports)
            assert server.port == ports[1]
            await server.stop(0)

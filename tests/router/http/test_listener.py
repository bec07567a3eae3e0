"""Connections are accepted while there is room, and none that is dropped keeps its place."""

import asyncio
import socket
import ssl

import pytest
import uvicorn
from uvicorn.server import ServerState

from common.trust.credentials import Credentials
from common.trust.doors import IssuedDoor
from common.trust.identity import Role
from router.http.connections import Connections, Patience
from router.http.listener import Listener
from router.http.protocol import DoorProtocol
from tests.router.fake_worker import TIMEOUT_S
from tests.router.http.connection import GET, answer
from tests.security.listeners import authority


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_connections_that_are_dropped_while_they_are_made_free_their_places(is_encrypted: bool) -> None:
    config = uvicorn.Config(answer, ws="none", lifespan="off", interface="asgi3", log_config=None)
    connections, state = Connections(most=2), ServerState()
    context = IssuedDoor(Credentials.of(authority(is_encrypted=True), Role.ROUTER, "router-0")).ssl_context()
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    silent = [socket.create_connection(listening.getsockname()) for _ in range(40)]

    def make() -> DoorProtocol:
        return DoorProtocol(config, state, connections=connections, patience=Patience())

    listener = Listener(listening, connections, make, (lambda: context) if is_encrypted else None)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*listening.getsockname(), ssl=trusting if is_encrypted else None)
        writer.write(GET)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        for each in silent:
            each.close()
        while connections.num_open:  # noqa: ASYNC110 - nothing reports it here
            await asyncio.sleep(0)
    listener.close()


@pytest.mark.parametrize("sent", [b"", GET])
async def test_client_that_has_left_before_it_is_accepted_costs_no_connection(sent: bytes) -> None:
    config = uvicorn.Config(answer, ws="none", lifespan="off", interface="asgi3", log_config=None)
    connections, state, made = Connections(most=16), ServerState(), []

    def make() -> DoorProtocol:
        made.append(DoorProtocol(config, state, connections=connections, patience=Patience()))
        return made[-1]

    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    for _ in range(40):
        with socket.create_connection(listening.getsockname()) as leaving:
            leaving.sendall(sent)
    listener = Listener(listening, connections, make)
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(GET)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert len(made) == 1
        writer.close()
        while connections.num_open:  # noqa: ASYNC110 - nothing reports it here
            await asyncio.sleep(0)
    listener.close()

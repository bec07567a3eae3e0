"""What one connection may cost, and that nothing that comes on it breaks into an answer."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http.connections import Connections, Patience
from router.http.protocol import MAX_PIPELINED, DoorProtocol
from tests.router.fakes import DECODE, PREFILL, TIMEOUT_S, FakeWorker
from tests.router.http.clients import head, http_cluster
from tests.router.http.test_disconnects import COMPLETIONS, body_of, sent

PATIENCE = Patience()
GET = b"GET / HTTP/1.1\r\n\r\n"


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once."""
    body = b"you"
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Stream:
    """Begins an answer, and ends it when told to."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.is_over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        self.has_begun.set()
        await self.is_over.wait()
        await send({"type": "http.response.body", "body": b"last", "more_body": False})


def connect(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> tuple[DoorProtocol, FakeTransport]:
    """Return a connection that has just been made."""
    config = uvicorn.Config(app, http=DoorProtocol, ws="none", lifespan="off", interface="asgi3", log_config=None)
    protocol = DoorProtocol(config, ServerState(), connections=Connections(most=16), patience=PATIENCE)
    transport = FakeTransport()
    protocol.connection_made(transport)
    return protocol, transport


async def until_idle(protocol: DoorProtocol) -> None:
    while protocol.tasks:
        await asyncio.wait(protocol.tasks)
        await asyncio.sleep(0)


async def count_calls(data: bytes) -> int:
    """Return how many Python calls a connection makes of what comes in one read."""
    num_calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    protocol, _transport = connect(answer)
    sys.setprofile(count)
    try:
        protocol.data_received(data)
    finally:
        sys.setprofile(None)
    await until_idle(protocol)
    protocol.connection_lost(None)
    return num_calls


async def test_read_full_of_requests_costs_a_bounded_number_of_steps() -> None:
    some, many = [await count_calls(GET * count) for count in (100, 3200)]
    assert many <= 2 * some


async def test_requests_beyond_the_limit_are_not_read_and_the_connection_ends_behind_the_others() -> None:
    protocol, transport = connect(answer)
    protocol.data_received(GET * 1000)
    assert len(protocol.pipeline) == MAX_PIPELINED
    protocol.data_received(GET * 1000)
    await until_idle(protocol)
    assert transport.written.count(b"HTTP/1.1 200") == 1 + MAX_PIPELINED
    assert transport.written.count(b"connection: close") == 1
    assert transport.written.rpartition(b"HTTP/1.1")[2].count(b"connection: close") == 1
    assert transport.is_closed
    protocol.connection_lost(None)


async def test_requests_up_to_the_limit_are_answered_and_the_connection_stays() -> None:
    protocol, transport = connect(answer)
    for _ in range(3):
        protocol.data_received(GET * (1 + MAX_PIPELINED))
        await until_idle(protocol)
    assert transport.written.count(b"HTTP/1.1 200") == 3 * (1 + MAX_PIPELINED)
    assert not transport.is_closed
    protocol.connection_lost(None)


BROKEN = {
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "a broken body": b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "a path outside ASCII": b"GET /\xff HTTP/1.1\r\n\r\n",
    "a tunnel": b"CONNECT there:443 HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_bytes_behind_a_request_do_not_break_into_its_answer(name: str) -> None:
    stream = Stream()
    protocol, transport = connect(stream)
    protocol.data_received(GET)
    await stream.has_begun.wait()
    protocol.data_received(BROKEN[name])
    stream.is_over.set()
    await until_idle(protocol)
    assert transport.written.endswith(b"first\r\n4\r\nlast\r\n0\r\n\r\n")
    assert transport.written.count(b"HTTP/1.1") == 1
    assert transport.is_closed
    protocol.connection_lost(None)


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_bytes_are_refused_in_openais_form(name: str) -> None:
    stream = Stream()
    protocol, transport = connect(stream if name != "a broken body" else silence)
    protocol.data_received(BROKEN[name])
    await asyncio.sleep(0)
    assert transport.written.count(b"HTTP/1.1 ") == 1
    assert transport.written.startswith(b"HTTP/1.1 400 ")
    assert b'"code": "broken_http"' in transport.written
    assert transport.is_closed
    protocol.connection_lost(None)
    await until_idle(protocol)


async def silence(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer nothing before the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def test_offer_of_another_protocol_is_answered_and_does_not_swallow_what_follows() -> None:
    protocol, transport = connect(answer)
    offer = b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    protocol.data_received(offer + GET)
    await until_idle(protocol)
    assert transport.written.count(b"HTTP/1.1 200") == 2
    protocol.connection_lost(None)


async def test_offer_of_another_protocol_with_a_body_is_refused_with_the_reason() -> None:
    protocol, transport = connect(answer)
    protocol.data_received(b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}")
    assert transport.written.startswith(b"HTTP/1.1 400 ")
    assert b"plain HTTP/1.1" in transport.written
    assert not protocol.tasks
    protocol.connection_lost(None)


async def test_client_that_leaves_having_sent_another_request_later_frees_everything() -> None:
    prefill, decode = FakeWorker("p0", PREFILL), FakeWorker("d0", DECODE)
    decode.gates.close("token 1")
    request = head("POST", COMPLETIONS, len(body_of()), connection="keep-alive") + body_of()
    async with http_cluster(prefill, decode) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(request)
        await decode.gates.reached("token 1")
        writer.write(request)
        await writer.drain()
        async with sent(http, head("GET", "/version", 0)) as other:
            await other.read()  # by now the router has read the second request as well
        writer.transport.abort()
        async with asyncio.timeout(TIMEOUT_S):
            assert (await http.cluster.until_idle()).num_cancelled == 1
        del reader

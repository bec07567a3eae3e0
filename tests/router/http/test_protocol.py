"""The cost of one connection is bounded, and nothing that comes on it breaks into an answer."""

import asyncio
import sys

import pytest
from starlette.types import Receive, Scope, Send

from router.http.protocol import MAX_PIPELINED
from tests.router.fake_worker import TIMEOUT_S
from tests.router.http.clients import COMPLETIONS, body_of, head, held_cluster, sent
from tests.router.http.connection import GET, Connection, answer, silence


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


async def count_calls(data: bytes) -> int:
    """Return the number of Python calls that a connection makes for the bytes of one read."""
    num_calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    async with Connection() as connection:
        sys.setprofile(count)
        try:
            connection.protocol.data_received(data)
        finally:
            sys.setprofile(None)
        await connection.until_idle()
    return num_calls


async def test_read_full_of_requests_costs_a_bounded_number_of_steps() -> None:
    some, many = [await count_calls(GET * count) for count in (100, 3200)]
    assert many <= 2 * some


async def test_requests_beyond_the_limit_are_not_read_and_end_the_connection() -> None:
    async with Connection() as connection:
        connection.protocol.data_received(GET * 1000)
        assert len(connection.protocol.pipeline) == MAX_PIPELINED
        connection.protocol.data_received(GET * 1000)
        await connection.until_idle()
        assert connection.written.count(b"HTTP/1.1 200") == 1 + MAX_PIPELINED
        assert connection.written.count(b"connection: close") == 1
        assert connection.written.rpartition(b"HTTP/1.1")[2].count(b"connection: close") == 1
        assert connection.is_closed


async def test_requests_up_to_the_limit_are_answered_and_the_connection_stays() -> None:
    async with Connection() as connection:
        for _ in range(3):
            connection.protocol.data_received(GET * (1 + MAX_PIPELINED))
            await connection.until_idle()
        assert connection.written.count(b"HTTP/1.1 200") == 3 * (1 + MAX_PIPELINED)
        assert not connection.is_closed


BROKEN = {
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "a broken body": b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "a path outside ASCII": b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "chunks of HTTP/1.0": b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a tunnel": b"CONNECT there:443 HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_bytes_behind_a_request_do_not_break_into_its_answer(name: str) -> None:
    stream = Stream()
    async with Connection(stream) as connection:
        connection.protocol.data_received(GET)
        await stream.has_begun.wait()
        connection.protocol.data_received(BROKEN[name])
        stream.is_over.set()
        await connection.until_idle()
        assert connection.written.endswith(b"first\r\n4\r\nlast\r\n0\r\n\r\n")
        assert connection.written.count(b"HTTP/1.1") == 1
        assert connection.is_closed


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_bytes_are_refused_in_openais_form(name: str) -> None:
    async with Connection(Stream() if name != "a broken body" else silence) as connection:
        connection.protocol.data_received(BROKEN[name])
        await asyncio.sleep(0)
        assert connection.written.count(b"HTTP/1.1 ") == 1
        assert connection.written.startswith(b"HTTP/1.1 400 ")
        assert b'"code": "broken_http"' in connection.written
        assert connection.is_closed


async def test_offer_of_another_protocol_is_answered_and_does_not_swallow_what_follows() -> None:
    async with Connection(answer) as connection:
        connection.protocol.data_received(
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + GET
        )
        await connection.until_idle()
        assert connection.written.count(b"HTTP/1.1 200") == 2


async def test_offer_of_another_protocol_with_a_body_is_refused_with_the_reason() -> None:
    async with Connection() as connection:
        offer = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"
        connection.protocol.data_received(offer)
        assert connection.written.startswith(b"HTTP/1.1 400 ")
        assert b"plain HTTP/1.1" in connection.written
        assert not connection.protocol.tasks


async def test_client_that_leaves_after_a_second_request_frees_everything() -> None:
    request = head("POST", COMPLETIONS, len(body_of()), connection="keep-alive") + body_of()
    async with held_cluster("token 1") as (http, decode):
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

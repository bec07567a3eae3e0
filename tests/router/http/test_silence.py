"""Clients that are silent or slow hold a connection for a bounded time, and never the last one."""

import asyncio

import pytest

from common.config import ConfigError
from router.http.connections import Connections
from tests.router.fakes import DECODE, TIMEOUT_S, FakeWorker, config_with
from tests.router.http.clients import COMPLETIONS, body_of, fetch, head, held_cluster, http_cluster
from tests.router.http.connection import GET, Connection, silence

MOST = 16


async def test_connection_that_says_nothing_is_closed() -> None:
    async with Connection() as client:
        assert not client.is_closed_after(19)
        assert client.is_closed_after(1)


async def test_head_that_comes_byte_by_byte_gets_no_more_time() -> None:
    async with Connection() as client:
        for byte in b"GET / HTTP/1.1\r\nh":
            await client.send(bytes([byte]))
            client.timers.advance(1)
        await client.send(b"o")
        assert not client.is_closed
        assert client.is_closed_after(20 - len(b"GET / HTTP/1.1\r\nh"))


async def test_connection_between_requests_is_kept_for_the_idle_time() -> None:
    async with Connection() as client:
        for _ in range(3):
            await client.send(GET)
            assert not client.is_closed_after(74)
        await client.send(b"\r\n")  # no request
        assert client.is_closed_after(1)


async def test_second_head_that_does_not_end_is_closed_like_the_first() -> None:
    async with Connection() as client:
        await client.send(GET)
        client.timers.advance(60)
        await client.send(GET[:5])
        assert not client.is_closed_after(19)
        await client.send(GET[5:6])
        assert client.is_closed_after(1)


async def test_body_of_an_answered_request_does_not_hold_the_connection() -> None:
    async with Connection() as client:
        await client.send(b"POST / HTTP/1.1\r\ncontent-length: 100\r\n\r\n")
        assert b"200 OK" in client.written
        client.timers.advance(19)
        await client.send(b"x")
        assert client.is_closed_after(1)


async def test_running_request_has_no_time_limit_of_the_connection() -> None:
    async with Connection(silence) as client:
        await client.send(GET)
        assert not client.is_closed_after(10_000)


class Mute:
    """A connection that counts how often it was dropped."""

    def __init__(self) -> None:
        self.num_drops = 0

    def drop(self) -> None:
        self.num_drops += 1


def test_full_table_drops_the_longest_waiting_connection_and_no_request() -> None:
    connections = Connections(most=3)
    first, second, third = [Mute() for _ in range(3)]
    for each in (first, second, third):
        assert connections.has_room()
        connections.add(each)
    connections.works(first)
    connections.waits(second)  # again: it keeps its place
    assert not connections.has_room()
    assert (first.num_drops, second.num_drops, third.num_drops) == (0, 1, 0)
    connections.discard(second)
    assert connections.has_room()
    connections.add(Mute())
    connections.waits(first)  # has just been answered
    assert not connections.has_room()
    assert (first.num_drops, third.num_drops) == (0, 1)


def test_full_table_of_running_requests_reports_one_that_may_go() -> None:
    heard: list[int] = []
    connections = Connections(most=1, on_room=lambda: heard.append(1))
    only = Mute()
    connections.add(only)
    connections.works(only)
    assert not connections.has_room()
    connections.waits(only)
    assert heard
    assert not connections.has_room()
    assert only.num_drops == 1


async def test_silent_connections_beyond_the_limit_shut_no_client_out() -> None:
    config = config_with(http_port=0, max_http_connections=MOST)
    async with http_cluster(FakeWorker("d0", DECODE), config=config) as http:
        silent = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(3 * MOST)]
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(3):
                assert (await fetch(http.port, "GET", "/version"))[0] == 200
        for _reader, writer in silent:
            writer.close()


async def test_running_requests_leave_room_for_inquiries_and_are_never_dropped() -> None:
    config = config_with(http_port=0, max_http_connections=MOST)
    body = body_of()
    async with held_cluster("token 1", config=config) as (http, decode), asyncio.timeout(TIMEOUT_S):
        running = [asyncio.create_task(fetch(http.port, "POST", COMPLETIONS, body)) for _ in range(MOST - 1)]
        while (await http.cluster.status()).router.num_request_tasks < MOST - 1:
            pass
        status, headers, answered = await fetch(http.port, "POST", COMPLETIONS, body)
        assert (status, b"too_many_requests_running" in answered) == (503, True)
        assert (headers["connection"], headers["retry-after"]) == ("close", "1")
        silent = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(3)]
        assert (await fetch(http.port, "GET", "/version"))[0] == 200
        decode.gates.open("token 1")
        assert [status for status, _, _ in await asyncio.gather(*running)] == [200] * len(running)
        for _reader, writer in silent:
            writer.close()
        await http.cluster.until_idle()


async def test_body_that_does_not_come_makes_room_before_a_request_that_runs() -> None:
    config = config_with(http_port=0, max_http_connections=MOST)
    async with http_cluster(FakeWorker("d0", DECODE), config=config) as http, asyncio.timeout(TIMEOUT_S):
        stalled = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(MOST - 1)]
        for _reader, writer in stalled:
            writer.write(head("POST", COMPLETIONS, 100) + b"{")
        while (await http.cluster.status()).router.num_request_tasks < len(stalled):
            pass
        for _ in range(2):
            assert (await fetch(http.port, "GET", "/version"))[0] == 200
        for _reader, writer in stalled:
            writer.close()
        await http.cluster.until_idle()


async def test_more_connections_than_open_files_stop_the_start() -> None:
    with pytest.raises(ConfigError, match=r"router\.max_http_connections: 100000000 do not fit"):
        async with http_cluster(config=config_with(http_port=0, max_http_connections=100_000_000)):
            pass

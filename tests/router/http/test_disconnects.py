"""Clients that leave, are silent or slow, and a router that stops: nothing is left behind or held for ever."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import openai
import pytest
from starlette.types import Message

from common.config import ConfigError
from router.http.connections import Connections
from router.http.exchange import Exchange
from router.line import admission
from router.record.budget import Budget
from router.tenants import Tenant
from tests.router.fake_worker import DECODE, TIMEOUT_S, FakeWorker, answer, held_pair, pair
from tests.router.fakes import config_with, prompt_of
from tests.router.http.clients import (
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    HttpCluster,
    body_of,
    fetch,
    head,
    held_cluster,
    http_cluster,
    request_of,
    sent,
)
from tests.router.http.connection import GET, Connection, silence


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "gate"),
    [
        *((COMPLETIONS, gate) for gate in ("reserve", "first_token", "fetch")),
        *itertools.product((COMPLETIONS, RESPONSES, MESSAGES), ("queue", "prefill", "token 1", "token 3")),
    ],
)
async def test_client_that_leaves_frees_everything(path: str, gate: str, is_streamed: bool) -> None:
    async with http_cluster(*held_pair(gate)) as http:
        async with sent(http, request_of(path, stream=is_streamed)):
            await http.cluster.until_held(gate)
        status = await http.cluster.until_idle()
        assert (status.num_cancelled, status.num_failed, status.num_completed) == (1, 0, 0)
        calls = http.cluster.decode.calls
        assert calls["cancelled"] == calls["started"] == (0 if gate == "queue" else 1)
        await http.until_responses(path, 499)


async def test_client_that_leaves_before_its_body_is_complete_frees_everything(http: HttpCluster) -> None:
    async with sent(http, head("POST", COMPLETIONS, 100) + b'{"prompt"'):
        await http.cluster.until(lambda router: router.num_request_tasks)
    assert (await http.cluster.until_idle()).num_cancelled == 1


async def test_client_that_leaves_a_call_of_several_prompts_cancels_all() -> None:
    async with held_cluster("token 1") as (http, decode):
        async with sent(http, request_of(COMPLETIONS, prompt=[prompt_of(5), prompt_of(9)], n=2)):
            await http.cluster.until(lambda _router: decode.calls["started"] >= 2)
        assert (await http.cluster.until_idle()).num_cancelled == 2
        assert decode.calls["cancelled"] == 2


async def test_client_that_does_not_read_delays_no_other() -> None:
    async with http_cluster(*pair()) as http, sent(http, request_of(COMPLETIONS, stream=True, max_tokens=100)):
        reply = await http.complete(prompt=prompt_of(12), return_token_ids=True)
        assert reply.choices[0].token_ids == answer(prompt_of(12), 6)


async def test_stop_lets_a_running_stream_end_and_refuses_new_calls() -> None:
    async with held_cluster("token 3") as (http, decode):
        stream = await http.complete(stream=True, return_token_ids=True)
        ids = [*(await anext(stream)).choices[0].token_ids]
        stopping = asyncio.create_task(http.cluster.router.stop(TIMEOUT_S))
        async with asyncio.timeout(TIMEOUT_S):
            while (await fetch(http.port, "GET", "/health"))[0] != 503:
                pass
        assert (await fetch(http.port, "POST", COMPLETIONS, body_of()))[0] == 503
        decode.gates.open("token 3")
        ids += [token async for chunk in stream for token in chunk.choices[0].token_ids]
        assert ids == answer(prompt_of(10), 6)
        await stopping


async def test_stop_without_grace_ends_a_stream_with_an_error() -> None:
    async with held_cluster("token 3") as (http, _):
        stream = await http.complete(stream=True)
        await anext(stream)
        stopping = asyncio.create_task(http.cluster.router.stop(0))
        with pytest.raises(openai.APIError, match="stopping"):
            async for _chunk in stream:
                pass
        await stopping


async def test_stop_without_grace_refuses_waiting_requests() -> None:
    async with held_cluster("reserve") as (http, decode):
        waiting = asyncio.create_task(fetch(http.port, "POST", COMPLETIONS, body_of()))
        await decode.gates.reached("reserve")
        await http.cluster.router.stop(0)
        status, _headers, body = await waiting
        assert (status, json.loads(body)["error"]["code"]) == (503, "stopping")


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
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
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


def test_strangers_take_at_most_one_place_of_tenants() -> None:
    connections = Connections(most=3)
    tenants, strangers = [Mute() for _ in range(3)], [Mute() for _ in range(20)]
    for each in tenants:
        connections.add(each)
        connections.works(each)
        connections.recognize(each)
        connections.waits(each)
    for stranger in strangers:
        while not connections.has_room():
            for each in (*tenants, *strangers):
                if each.num_drops:
                    connections.discard(each)
        connections.add(stranger)
    assert [each.num_drops for each in tenants] == [1, 0, 0]


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
    with pytest.raises(ConfigError, match="100000000 do not fit"):
        async with http_cluster(config=config_with(http_port=0, max_http_connections=100_000_000)):
            pass


async def test_whole_answer_that_is_not_read_gives_way_to_another_tenants() -> None:
    budget, dropped = Budget("bytes", most=8, most_in_all=12), asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await dropped.wait()

    scope = {"method": "GET", "headers": [], "state": {"connection": SimpleNamespace(drop=dropped.set)}}
    exchange = Exchange(scope, asyncio.Event().wait, send, max_body_bytes=1)  # type: ignore[arg-type]
    exchange.unread = budget.holding(Tenant(name="slow"), lambda _refused: exchange.break_off())
    exchange.finish_body(b"8 bytes.", "text/plain")
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(exchange.close())
        while budget.num_held < 8:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)
        with budget.holding(Tenant(name="other")) as holding:
            assert holding.grow(5) is None
    assert not budget.num_held


async def test_whole_answers_are_refused_once_too_many_are_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_UNREAD_BYTES", 64)
    async with http_cluster(*pair(), config=config_with(http_port=0)) as http:
        status, _headers, body = await fetch(http.port, "POST", COMPLETIONS, body_of())
        assert (status, b"unread answers" in body) == (429, True)
        assert (await fetch(http.port, "POST", COMPLETIONS, body_of(stream=True)))[0] == 200
        await http.cluster.until_idle()
        assert not http.cluster.router.door.parts.admission.unread.num_held

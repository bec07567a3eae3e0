"""A stream shows that it goes on while nothing comes, and reaches clients of HTTP/1.0 without chunks."""

import asyncio
import json
from collections.abc import Callable

import pytest

from common.errors import EngineFault
from router.http import exchange
from tests.router.fake_worker import TIMEOUT_S, pair
from tests.router.fakes import config_with
from tests.router.http.clients import (
    ASKED,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    held_cluster,
    http_cluster,
    request_of,
    sent,
)

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
COMMENT = b": waiting\n\n"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams show at once that they go on."""
    monkeypatch.setattr(exchange, "SILENCE_S", 0.001)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ASKED)
async def test_stream_without_a_token_shows_that_it_goes_on(path: str) -> None:
    async with asyncio.timeout(TIMEOUT_S), held_cluster("token 1") as (http, decode):
        async with sent(http, request_of(path, stream=True)) as reader:
            top = await reader.readuntil(b"\r\n\r\n")
            assert top.startswith(b"HTTP/1.1 200")
            assert b"text/event-stream" in top
            for _ in range(2):
                await reader.readuntil(PING if path == MESSAGES else COMMENT)
            decode.gates.open("token 1")
            rest = await reader.read()
        assert rest.count(b"data: ") >= 2
        assert (await http.cluster.until_idle()).num_completed == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("path", "told"),
    [(CHAT, b'data: {"error"'), (RESPONSES, b"event: response.created"), (MESSAGES, b"event: error")],
)
async def test_error_behind_a_sign_of_life_is_an_event(path: str, told: bytes) -> None:
    prefill, decode = pair()
    decode.gates.close("token 1")
    decode.faults["token 1"] = EngineFault("a step failed")
    config = config_with(http_port=0, max_attempts=1)
    async with asyncio.timeout(TIMEOUT_S), http_cluster(prefill, decode, config=config) as http:
        async with sent(http, request_of(path, stream=True)) as reader:
            await reader.readuntil(b"\r\n\r\n")
            decode.gates.open("token 1")
            rest = await reader.read()
        assert told in rest
        assert b"a step failed" in rest
        assert (await http.cluster.until_idle()).num_failed == 1


@pytest.mark.usefixtures("impatient")
async def test_request_that_waits_for_its_admission_keeps_its_status() -> None:
    config = config_with(http_port=0, queue_timeout_s=0.05)
    async with http_cluster(config=config) as http, sent(http, request_of(CHAT, stream=True)) as reader:
        assert (await reader.read()).startswith(b"HTTP/1.1 503")


def as_old(raw: bytes) -> bytes:
    return raw.replace(b"HTTP/1.1", b"HTTP/1.0")


def whole(raw: bytes) -> bytes:
    return raw


@pytest.mark.parametrize("version", [as_old, whole])
async def test_stream_has_chunks_only_where_http_has_them(version: Callable[[bytes], bytes]) -> None:
    async with http_cluster(*pair()) as http:
        async with sent(http, version(request_of(COMPLETIONS, stream=True))) as reader:
            top, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in top) == (version is whole)
        assert b"connection: close" in top
        assert rest.endswith(b"data: [DONE]\n\n" if version is as_old else b"0\r\n\r\n")
        async with sent(http, version(request_of(COMPLETIONS))) as reader:
            top, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert f"content-length: {len(rest)}".encode() in top
        assert json.loads(rest)["choices"]

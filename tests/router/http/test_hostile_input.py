"""Malformed input of any kind gets one clear refusal, and the router lives on."""

import asyncio
import gc
import json
from types import FrameType

import pytest

from router.doors.readers import INLINE_BYTES
from router.http.bodies import read_body
from router.http.protocol import MAX_HEAD_BYTES
from tests.router.fake_worker import TIMEOUT_S, pair
from tests.router.fakes import config_with
from tests.router.http.clients import CHAT, COMPLETIONS, HttpCluster, body_of, fetch, http_cluster

BODIES = {
    "nothing": b"",
    "no JSON": b"hello",
    "cut off": b'{"prompt": "a',
    "a list": b"[1]",
    "null": b"null",
    "not UTF-8": b'{"prompt": "\xff"}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "a huge number": b'{"prompt": "a", "max_tokens": 1' + b"0" * 4000 + b"}",
    "a number of too many digits": b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
    "deep lists": b'{"prompt": ' + b"[" * 100_000,
    "deep closed lists": b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}",
    "deep objects": b'{"metadata": ' * 1000,
    "a true count": b'{"prompt": "a", "n": true}',
    "a text for a number": b'{"prompt": "a", "temperature": "1"}',
    "a huge token id": b'{"prompt": [99999999999999999999]}',
    "a negative token id": b'{"prompt": [-1]}',
    "a broken token id": b'{"prompt": [1.5]}',
    "an object for a prompt": b'{"prompt": {}}',
    "an object in the prompt": b'{"prompt": [{}]}',
    "an empty prompt of tokens": b'{"prompt": [[]]}',
    "an unknown field of many characters": b'{"prompt": "a", "kvrelay": {"' + b"x" * 10_000 + b'": 1}}',
    "many unknown fields": json.dumps({"prompt": "a"} | {f"unknown {number}": 1 for number in range(10_000)}).encode(),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.asyncio(loop_scope="module")
async def test_malformed_body_is_a_bad_request_and_leaves_nothing(shared_http: HttpCluster, name: str) -> None:
    for path in (COMPLETIONS, CHAT):
        status, headers, body = await fetch(shared_http.port, "POST", path, BODIES[name])
        assert (status, headers["content-type"]) == (400, "application/json"), body
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert len(body) < 1000
    await shared_http.cluster.until_idle()


async def test_body_that_is_too_large_is_refused() -> None:
    size = (1 << 20) + 1
    async with http_cluster(*pair(), config=config_with(http_port=0, max_message_mib=1)) as http:
        status, _headers, body = await fetch(http.port, "POST", COMPLETIONS, b"x" * size)
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        await http.cluster.until_idle()


@pytest.mark.parametrize(
    "start",
    [b"content-length: 1000000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n900000\r\n" + b"x" * 0x900000],
)
async def test_body_that_is_much_too_large_is_refused_while_it_comes(start: bytes) -> None:
    async with http_cluster(*pair(), config=config_with(http_port=0, max_message_mib=1)) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + start)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await reader.readline()).split()[1] == b"413"
        writer.transport.abort()
        await http.cluster.until_idle()


async def test_head_without_an_end_breaks_the_connection(http: HttpCluster) -> None:
    _reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nx: ")
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                writer.write(b"x" * (MAX_HEAD_BYTES // 8))
                await writer.drain()
    writer.transport.abort()
    assert (await fetch(http.port, "GET", "/health"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/index.html", 404),
        ("GET", "/v1/completions/", 404),
        ("POST", "/v1/images", 404),
        ("GET", "/v1/%ff%00", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("HEAD", "/health", 200),
    ],
)
async def test_other_paths_and_methods_are_refused_in_openais_form(
    http: HttpCluster, method: str, path: str, status: int
) -> None:
    found, _headers, body = await fetch(http.port, method, path)
    assert found == status
    if status != 200:
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.usefixtures("no_collecting")
async def test_a_refused_body_is_not_kept_until_garbage_is_collected(http: HttpCluster) -> None:
    body = body_of(prompt=["x", *[1] * 20_000])
    assert len(body) > INLINE_BYTES
    for _ in range(3):
        status, _headers, _answer = await fetch(http.port, "POST", COMPLETIONS, body)
        assert status == 400
    await http.until_responses(COMPLETIONS, 400, 3)
    async with asyncio.timeout(TIMEOUT_S):  # a response is counted before its task is over
        while any(  # noqa: ASYNC110 - garbage announces nothing
            isinstance(each, FrameType) and each.f_code is read_body.__code__ for each in gc.get_objects()
        ):
            await asyncio.sleep(0)

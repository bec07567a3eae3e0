"""Bytes on an HTTP connection."""

import asyncio
import copy
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httptools

from tests.fuzz.messages import Source
from tests.fuzz.services import MAX_MODEL_LEN
from tests.fuzz.target import Target
from tests.fuzz.world import World

_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
_REQUESTS: Sequence[tuple[str, str, Any]] = (
    ("POST", "/v1/chat/completions", _CHAT),
    ("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 4}),
    ("POST", "/v1/chat/completions", {**_CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/completions", {"prompt": [1, 2, 3], "n": 2, "stream": True, "logprobs": 2, "max_tokens": 4}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "stop": ["e"], "max_tokens": 20, "kvrelay": {"report": True}}),
    ("POST", "/v1/embeddings", {"input": "hello", "encoding_format": "base64", "dimensions": 4}),
    ("POST", "/v1/embeddings", {"input": [[1, 2], [3]], "pooling": "mean", "kvrelay": {"report": True}}),
    ("POST", "/tokenize", {"prompt": "hello"}),
    ("POST", "/detokenize", {"tokens": [104, 105]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake", None),
    ("GET", "/health", None),
    ("GET", "/metrics", None),
    ("HEAD", "/version", None),
)
_VALUES: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**400, 0.5, -0.0, 1e308, "", "x", "ä😀", "\ud800", "\0"),
    *("x" * MAX_MODEL_LEN, "x" * 70_000, [], {}, [1], ["x"], [[1, 2]], [None], {"x": 1}, [0] * 3000, [[]] * 300),
)
_KEYS = (
    *("model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options"),
    *(
        "prompt",
        "messages",
        "echo",
        "logprobs",
        "top_logprobs",
        "kvrelay",
        "priority",
        "stop_token_ids",
        "user",
        "tools",
    ),
    *("role", "content", "timeout_s", "report", "include_usage", "return_token_ids", "min_tokens", "what"),
)
_HEADERS = (
    b"content-length: 5",
    b"content-length: -1",
    b"content-length: 99999999999999999999",
    b"content-length: \xb2",
    b"transfer-encoding: chunked",
    b"expect: 100-continue",
    b"connection: close",
    b"connection: upgrade\r\nupgrade: websocket",
    b"authorization: Bearer \xff\xfe",
    b"x: " + b"y" * 9_000,
    b"\xff: \0",
)
_GAPS_S = (0.0, 0.001, 0.1, 5.0)
_READS_FOR_S = 200.0
"""Longer than idle connections are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    pieces: Sequence[bytes]
    gap_s: float
    leaves_at: int | None
    """After how many pieces the client leaves."""


class HttpTarget(Target):
    """Requests right and wrong, cut into pieces, and anything else that bytes can be."""

    name = "http"

    def prepare(self, world: World, data: bytes) -> _Plan:
        """Return what the client sends."""
        source = Source(data)
        way = source.byte() % 4
        gap_s, leaves = source.choose(_GAPS_S), source.byte()
        raw = source.rest() if way == 3 else b"".join(_request(source) for _ in range(1 + source.below(3)))
        if way == 2 and raw:
            raw = _mangle(raw, source)
        cuts = sorted(source.below(len(raw) + 1) for _ in range(source.below(5)))
        pieces = [raw[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        return _Plan(pieces=pieces, gap_s=gap_s, leaves_at=leaves % len(pieces) if leaves > 200 else None)

    async def play(self, world: World, plan: Any) -> list[str]:
        """Send it and read until the connection is idle or over."""
        protocol = world.connect_http()
        transport = _Transport(protocol)
        protocol.connection_made(transport)
        for position, piece in enumerate(plan.pieces):
            if plan.leaves_at == position or transport.is_over:
                break
            await transport.may_send.wait()
            if not transport.is_over:
                protocol.data_received(piece)
            await asyncio.sleep(plan.gap_s)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(_READS_FOR_S):
                    await transport.over.wait()
        transport.leave()
        return _judge(bytes(transport.sent))


def _request(source: Source) -> bytes:
    """Return one request."""
    method, path, body = source.choose(_REQUESTS)
    if source.byte() % 8 == 7:
        method = source.choose(("GET", "POST", "PUT", "OPTIONS", "HEAD", "CONNECT", "PRI"))
    if source.byte() % 8 == 7:
        path = source.choose(
            ("/", "*", "//x", "/%ff%00", "/v1/models/" + "x" * 500, "http://x/health", "/health?a=%zz")
        )
    content = b"" if body is None else _body(body, source)
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: x"]
    if source.byte() % 4 != 3:
        lines.append(b"content-length: %d" % len(content))
    lines += [source.choose(_HEADERS) for _ in range(source.below(3) if source.byte() > 128 else 0)]
    if b"transfer-encoding: chunked" in lines:
        content = b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n"
    return b"\r\n".join([*lines, b"", content])


def _body(body: Any, source: Source) -> bytes:
    """Return a body as JSON, with some values changed."""
    changed = json.loads(json.dumps(body))
    for _ in range(source.below(4)):
        place = changed
        while isinstance(place, dict | list) and place and source.byte() % 3:
            inner = source.choose(list(place.values()) if isinstance(place, dict) else place)
            if not isinstance(inner, dict | list):
                break
            place = inner
        if isinstance(place, dict):
            place[source.choose(_KEYS)] = copy.deepcopy(source.choose(_VALUES))
        elif isinstance(place, list):
            place.append(copy.deepcopy(source.choose(_VALUES)))
    raw = json.dumps(changed).encode()
    match source.byte() % 16:
        case 15:
            return raw[: source.below(len(raw))]
        case 14:
            return b"[" * 5_000 + raw
        case 13:
            return raw.replace(b"4", b"NaN").replace(b"1", b"9" * 5_000)
        case 12:
            return raw.decode().encode("utf-16")
    return raw


def _mangle(raw: bytes, source: Source) -> bytes:
    mangled = bytearray(raw)
    for _ in range(1 + source.below(4)):
        place = source.below(len(mangled))
        mangled[place : place + source.below(3)] = source.take(source.below(3))
    return bytes(mangled)


class _Transport(asyncio.Transport):
    """The server's side of a connection whose client reads everything at once."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 2)})
        self._protocol = protocol
        self._is_closing = False
        self.sent = bytearray()
        self.over = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def leave(self) -> None:
        """The client closes the connection."""
        if not self._is_closing:
            self._is_closing = True
            self._protocol.connection_lost(None)
        self.over.set()

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self.sent += data

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._close)

    abort = close

    def _close(self) -> None:
        self._protocol.connection_lost(None)
        self.over.set()
        self.may_send.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.may_send.clear()

    def resume_reading(self) -> None:
        self.may_send.set()

    def is_reading(self) -> bool:
        return self.may_send.is_set()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class _Responses:
    """Requests that `httptools` finds in the bytes that were sent."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def on_headers_complete(self) -> None:
        self.statuses.append(self.parser.get_status_code())

    parser: Any = None


def _judge(sent: bytes) -> list[str]:
    """Every response is well formed, and none says that the server has failed."""
    found = _Responses()
    found.parser = httptools.HttpResponseParser(found)
    try:
        found.parser.feed_data(sent)
    except httptools.HttpParserError:
        # The answer to HEAD has a length and no body: what follows is not for this parser.
        if b"HTTP/1.1 " not in sent[:9]:
            return [f"protocol: no response begins with {sent[:40]!r}"]
    except httptools.HttpParserUpgrade:
        pass
    return [f"status: {status}" for status in found.statuses if status == 500 or status in (501, 502, 505)]

"""Bytes on an HTTP connection."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httptools

from tests.fuzz.http import Answers, talk
from tests.fuzz.messages import Source, mangled
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
    ("POST", "/v1/messages", {**_CHAT, "metadata": {"user_id": "mine"}}),
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
    *("prompt", "messages", "echo", "logprobs", "top_logprobs", "kvrelay", "priority", "stop_token_ids", "user"),
    *("tools", "prompt_cache_key", "metadata", "user_id"),
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
    b"x-session-id: \xff" + b"y" * 9_000,
)
_GAPS_S = (0.0, 0.001, 0.1, 5.0)


def _with_body(path: str, fields: object, *, is_chunked: bool = False) -> bytes:
    body = json.dumps(fields).encode()
    framing = b"content-length: %d" % len(body)
    if is_chunked:
        framing, halves = b"transfer-encoding: chunked", (body[: len(body) // 2], body[len(body) // 2 :], b"")
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in halves)
    return b"POST %s HTTP/1.1\r\nhost: x\r\n%s\r\n\r\n%s" % (path.encode(), framing, body)


_COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 3}
RIGHT: Sequence[tuple[bytes, int]] = (
    (b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", 200),
    (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 200),
    (b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    (b"DELETE /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 405),
    (_with_body("/v1/completions", _COMPLETION), 200),
    (_with_body("/v1/completions", {**_COMPLETION, "stream": True}), 200),
    (_with_body("/v1/completions", _COMPLETION, is_chunked=True), 200),
    (_with_body("/tokenize", {"prompt": "text"}, is_chunked=True), 200),
    (_with_body("/detokenize", {"tokens": ["a"]}), 400),
    (_with_body("/live", {"a": "body that nobody reads"}), 405),
)
"""Well-formed requests with their statuses: each is answered once, in order, however its bytes are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    pieces: Sequence[bytes]
    gap_s: float
    leaves_at: int | None
    """After how many pieces the client leaves."""
    expected: Sequence[int] | None
    """Statuses of the answers, where they are certain."""


class HttpTarget(Target):
    """Requests right and wrong, cut into pieces, and anything else that bytes can be."""

    name = "http"

    def prepare(self, world: World, data: bytes) -> _Plan:
        """Return what the client sends."""
        source = Source(data)
        way = source.byte() % 4
        gap_s, leaves = source.choose(_GAPS_S), source.byte()
        expected = None
        if way == 3:
            raw = source.rest()
        elif way == 1:
            chosen = [source.choose(RIGHT) for _ in range(1 + source.below(6))]
            raw, expected = b"".join(request for request, _status in chosen), [status for _request, status in chosen]
        else:
            raw = b"".join(_request(source) for _ in range(1 + source.below(3)))
        if way == 2:
            raw = mangled(raw, source)
        cuts = sorted(source.below(len(raw) + 1) for _ in range(source.below(5)))
        pieces = [raw[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        leaves_at = leaves % len(pieces) if leaves > 200 else None
        is_certain = leaves_at is None and gap_s < 1.0  # a client that is too slow is left
        return _Plan(pieces=pieces, gap_s=gap_s, leaves_at=leaves_at, expected=expected if is_certain else None)

    async def play(self, world: World, plan: Any) -> list[str]:
        """Send it and read the answers."""
        return _judge(await talk(world, plan.pieces, gap_s=plan.gap_s, leaves_at=plan.leaves_at), plan.expected)


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


def _judge(came: bytes, expected: Sequence[int] | None) -> list[str]:
    """Every answer is well formed, none says that the server has failed, and no expected one is missing."""
    try:
        statuses = Answers(came).statuses
    except httptools.HttpParserError:
        # The answer to HEAD has a length and no body: what follows is not for this parser.
        return [] if b"HTTP/1.1 " in came[:9] else [f"protocol: no answer begins with {came[:40]!r}"]
    if expected is not None and statuses != expected:
        return [f"protocol: answered {statuses}, not {expected}"]
    return [f"status: {status}" for status in statuses if status in (500, 501, 502, 505)]

"""A cluster of scripted workers with the HTTP API, and OpenAI's own client in front of it."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from common.config import RouterConfig, ServingConfig
from tests.router.fake_worker import TIMEOUT_S, FakeWorker, pair
from tests.router.fakes import TestCluster, config_with, prompt_of, running_cluster

API_KEY = "sk-not-needed"
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
_TURNS = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 6},
    CHAT: {"messages": _TURNS, "max_tokens": 6},
    RESPONSES: {"input": "hi", "max_output_tokens": 6},
    MESSAGES: {"messages": _TURNS, "max_tokens": 6},
}
"""A body for each endpoint that generates, which asks for six tokens."""


@dataclass(slots=True, kw_only=True)
class HttpCluster:
    """A cluster, its HTTP port, and a client that never retries."""

    cluster: TestCluster
    client: AsyncOpenAI

    @property
    def port(self) -> int:
        return self.cluster.router.http_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def complete(self, **options: Any) -> Any:
        """Ask for six tokens after a prompt of ten; `options` may say otherwise."""
        return await _create(self.client.completions.create, {"prompt": prompt_of(10), "max_tokens": 6} | options)

    async def chat(self, **options: Any) -> Any:
        """Ask for an answer to a short conversation; `options` may say otherwise."""
        return await _create(self.client.chat.completions.create, {"messages": _TURNS} | options)

    async def post(self, path: str, body: Mapping[str, Any], **headers: str) -> tuple[int, dict[str, str], Any]:
        """Send a JSON body on a connection of its own; return status, headers and document."""
        status, answered, document = await fetch(self.port, "POST", path, json.dumps(body).encode(), **headers)
        return status, answered, json.loads(document)

    async def until_responses(self, path: str, status: int, count: int = 1) -> None:
        """Wait until that many requests of a path ended with a status."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_responses(path, status) != count:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.005)

    def num_responses(self, path: str, status: int) -> float:
        registry, labels = self.cluster.router.registry, {"path": path, "status": str(status)}
        return registry.get_sample_value("kvrelay_http_responses_total", labels) or 0


def request_of(path: str, **fields: Any) -> bytes:
    """Return a whole request that asks an endpoint for six tokens; `fields` may say otherwise."""
    body = json.dumps(ASKED[path] | fields).encode()
    return head("POST", path, len(body)) + body


def body_of(**fields: Any) -> bytes:
    return json.dumps({"prompt": prompt_of(10), "max_tokens": 6, **fields}).encode()


@asynccontextmanager
async def http_cluster(
    *workers: FakeWorker, config: RouterConfig | ServingConfig | None = None, api_key: str = API_KEY
) -> AsyncIterator[HttpCluster]:
    """Start workers and a router with the HTTP API."""
    config = config_with(http_port=0) if config is None else config
    async with running_cluster(*workers, config=config) as cluster:
        base_url = f"http://127.0.0.1:{cluster.router.http_port}/v1"
        async with AsyncOpenAI(
            base_url=base_url,
            api_key=api_key,
            max_retries=0,
            timeout=TIMEOUT_S,
            http_client=DefaultAsyncHttpxClient(verify=False),  # reads no list of authorities, which it does not need
        ) as client:
            yield HttpCluster(cluster=cluster, client=client)


@asynccontextmanager
async def held_cluster(gate: str, config: RouterConfig | None = None) -> AsyncIterator[tuple[HttpCluster, FakeWorker]]:
    """Start a cluster whose decode worker stops at a gate; yields that worker, too."""
    prefill, decode = pair()
    decode.gates.close(gate)
    async with http_cluster(prefill, decode, config=config) as http:
        yield http, decode


async def fetch(
    port: int, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send one request over a connection of its own; return status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(method, path, len(body), **headers) + body)
        raw = await reader.read()
    finally:
        writer.close()
    top, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(status.split()[1]), found, rest


@asynccontextmanager
async def sent(http: HttpCluster, raw: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Send bytes on a connection of their own, which is broken when the block ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(raw)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.transport.abort()


def head(method: str, path: str, content_length: int, **headers: str) -> bytes:
    """Return the head of a request."""
    told = {"host": "test", "connection": "close", "content-length": str(content_length), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def _create(create: Callable[..., Awaitable[Any]], options: dict[str, Any]) -> Any:
    """Call OpenAI's client; options that it does not name go out as further fields of the body."""
    known = inspect.signature(create).parameters.keys()
    further = {name: value for name, value in options.items() if name not in known}
    named = {name: value for name, value in options.items() if name in known}
    return await create(**{"model": "fake"} | named, extra_body=further)

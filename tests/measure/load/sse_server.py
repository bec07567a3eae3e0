"""A scripted OpenAI-compatible server on a free port, in this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(slots=True, kw_only=True)
class ScriptedServer:
    """Streams tokens "t0 ", "t1 ", … with the ids 100, 101, …, like vLLM. It refuses unknown fields."""

    known: frozenset[str] = frozenset({"ignore_eos", "min_tokens", "return_token_ids"})
    tells_ids: bool = True
    owned_by: str = "vllm"
    completes_text: bool = True
    tells_reason_apart: bool = False
    """Whether the last event has only a reason, and is no token."""
    refuse_with: tuple[int, Any] | None = None
    """Status and body instead of an answer."""
    break_after: int | None = None
    """Number of events after which the connection breaks."""
    error_after: int | None = None
    """Number of events after which the stream has an error."""
    hold: asyncio.Event | None = None
    """Event that answers, except to probes, wait for after their first token."""
    metrics: str | None = None
    report: dict[str, Any] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    num_awaited: int = 1
    """Number of answers to requests of a load test after whose beginnings `began` is set."""
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when so many answers have begun."""
    url: str = ""

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": self.owned_by, "max_model_len": 512}]})

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "9.9"})

    async def metrics_page(self, _request: web.Request) -> web.Response:
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        if not self.completes_text:
            return web.json_response({"error": {"message": "no such endpoint"}}, status=404)
        return await self._answer(request, lambda text, _first: {"text": text})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        def part(text: str, first: bool) -> dict[str, Any]:
            return {"delta": {"role": "assistant", "content": ""} if first else {"content": text}}

        return await self._answer(request, part)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Answer as Anthropic's API does, with pieces "t0 ", "t1 "…"""
        body = await request.json()
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("x-api-key"))
        if self.refuse_with is not None:
            status, told = self.refuse_with
            return web.json_response(told, status=status)
        usage = {"input_tokens": 4, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 1, "output_tokens": 1}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": {"id": "msg-1", "usage": usage}}]
        for number in range(body["max_tokens"]):
            events.append({"type": "content_block_delta", "delta": {"type": "text_delta", "text": f"t{number} "}})
        events.append({"type": "message_delta", "usage": {"output_tokens": body["max_tokens"]}})
        events.append({"type": "message_stop"})
        if self.error_after is not None:
            events[self.error_after] = {"type": "error", "error": {"type": "api_error", "message": "overloaded"}}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events[: self.break_after]:
            await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        return response

    async def _answer(self, request: web.Request, part: Callable[[str, bool], dict[str, Any]]) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("Authorization"))
        extras = {"ignore_eos", "min_tokens", "return_token_ids"} & set(body)
        if extras - self.known:
            field_name = min(extras - self.known)
            error = {"error": {"message": f"{field_name} is unknown", "param": field_name}}
            return web.json_response(error, status=400)
        if self.refuse_with is not None:
            status, told = self.refuse_with
            return web.json_response(told, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, request, body, part)
        except (ConnectionError, asyncio.CancelledError):
            self.client_left.set()
            raise
        return response

    async def _stream(
        self,
        response: web.StreamResponse,
        request: web.Request,
        body: dict[str, Any],
        part: Callable[[str, bool], dict[str, Any]],
    ) -> None:
        async def send(event: dict[str, Any] | str) -> None:
            data = event if isinstance(event, str) else json.dumps({"id": "cmpl-1", **event})
            await response.write(f"data: {data}\n\n".encode())

        num_tokens = body["max_tokens"]
        if "messages" in body:
            await send({"choices": [{"index": 0, **part("", True)}]})
        for number in range(num_tokens):
            if number == self.break_after:
                assert request.transport is not None
                request.transport.abort()
                return
            if number == self.error_after:
                await send({"error": {"message": "the engine died", "code": 500}})
                return
            is_last = number + 1 == num_tokens and not self.tells_reason_apart
            choice = {"index": 0, **part(f"t{number} ", False)}
            choice["finish_reason"] = "length" if is_last else None
            if body.get("return_token_ids") and self.tells_ids:
                choice["token_ids"] = [100 + number]
            await send({"choices": [choice]})
            if not _is_probe(body):
                self.num_awaited -= number == 0
                if self.num_awaited <= 0:
                    self.began.set()
                if self.hold is not None:
                    await self.hold.wait()
        if self.tells_reason_apart:
            await send({"choices": [{"index": 0, **part("", False), "finish_reason": "length"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": 3}}
        last: dict[str, Any] = {"choices": [], "usage": usage}
        if self.report is not None and body.get("kvrelay"):
            last["kvrelay"] = self.report
        await send(last)
        await send("[DONE]")


def _is_probe(body: dict[str, Any]) -> bool:
    prompt = body.get("prompt")
    return prompt == "Hello" or (isinstance(prompt, list) and len(prompt) == 1)


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    """Serve within the block, and set `server.url`."""
    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", server.models),
            web.get("/version", server.version),
            web.get("/metrics", server.metrics_page),
            web.post("/v1/completions", server.completions),
            web.post("/v1/chat/completions", server.chat),
            web.post("/v1/messages", server.messages),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()

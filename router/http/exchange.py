"""One HTTP request and its response, over raw ASGI.

`listen` receives the body and the disconnect. It runs beside the handler, so that a client that leaves is noticed in
every state of its request. The handler sends the parts of a stream as they come, and states the end of the response
by `finish`: after a complete response the server reports a disconnect as well.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.types import Receive, Scope, Send

from common.errors import KvrelayError
from common.ids import RequestId
from common.structured import completed, for_each, one_turn
from router.http.encodings import encoding_of, unpacked
from router.http.errors import OPENAI, REQUEST_TIMEOUT, TOO_LARGE, Dialect, Headers, HttpError, error_headers, kind_of
from router.http.json_parts import json_parts
from router.http.left_out import warning_headers
from router.record.budget import Holding
from router.record.sessions import MAX_SESSION_CHARS

JSON: Headers = [(b"content-type", b"application/json")]
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not gather tokens
]
_CHUNK_BYTES = 1 << 18
SILENCE_S = 10.0
"""Time after which a stream without an event shows that it goes on: proxies end connections that are silent."""
_MAX_DROPPED = 8
"""Multiple of the largest body that is read before its refusal: many clients read answers only after sending all."""


class Exchange:
    """One request. Event loop only."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, max_body_bytes: int, dialect: Dialect = OPENAI
    ) -> None:
        self._dialect = dialect
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        loop = asyncio.get_running_loop()
        self._body: asyncio.Future[None] = loop.create_future()
        """Done when the body is whole, or refused."""
        self._chunks: list[bytes] = []
        """The body, until a handler has taken it."""
        self._holding: asyncio.Future[Holding] = loop.create_future()
        """Set when the handler wants the body."""
        self._last: Iterable[str] = ()
        self._document: tuple[Iterable[str | bytes], Headers] | None = None
        self.scope = scope
        self.method: str = scope["method"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.request_id: RequestId | None = None
        """Sent in a header once it is set."""
        self.status = 0
        """Status of the response; 0 before it begins."""
        self.is_gone = False
        """Whether the client has left."""
        self.pause: Callable[[], Awaitable[None]] = one_turn
        """Awaited between parts of an answer that take some milliseconds each."""
        self.unread: AbstractContextManager[Holding | None] = nullcontext()
        """Share of the tenant in the bound on whole answers that clients have not read."""
        self.left_out: Sequence[str] = ()
        """Parts of the request without an effect; a header of the response names them."""
        self._is_silent = True
        """Whether no event has been sent for a while."""
        self.failure_events: Callable[[KvrelayError], Iterable[str]] | None = None
        """Returns the last events of a stream that fails; None: one event with the error."""

    @property
    def metadata(self) -> list[tuple[str, str | bytes]]:
        """The headers that the authenticator reads; without `authorization` a key may be in `x-api-key`."""
        given: list[tuple[str, str | bytes]] = [
            (name.decode("latin-1"), value) for name, value in self.headers if name == b"authorization"
        ]
        return given or [("authorization", b"Bearer " + value) for name, value in self.headers if name == b"x-api-key"]

    @property
    def traceparent(self) -> str:
        """The client's place in a trace (common/tracing.py); empty without one."""
        return next((value.decode("latin-1") for name, value in self.headers if name == b"traceparent"), "")

    @property
    def session_name(self) -> str:
        """The session that a header names; empty without one."""
        return next(
            (value[:MAX_SESSION_CHARS].decode("latin-1") for name, value in self.headers if name == b"x-session-id"), ""
        )

    async def listen(self) -> None:
        """Receive the body once it is wanted; returns when the client leaves."""
        num_bytes = 0
        if any(name == b"expect" for name, _value in self.headers):
            await asyncio.shield(self._holding)  # to receive tells such a client that its body is wanted
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
                return
            chunk = message.get("body", b"")
            is_over = not message.get("more_body", False)
            holding = await asyncio.shield(self._holding)
            num_bytes += len(chunk)
            if not self._body.done() and num_bytes <= self._max_body_bytes:
                if (refused := holding.grow(len(chunk))) is not None:
                    self._refuse_body(refused.error())
                    continue
                self._chunks.append(chunk)
                if is_over:
                    self._body.set_result(None)
                continue
            self._chunks.clear()  # the rest is read all the same: the client reads no answer before it has sent it
            if is_over or num_bytes > _MAX_DROPPED * self._max_body_bytes:
                self._refuse_body(self._too_large())

    async def body(self, holding: Holding, *, timeout_s: float) -> bytes:
        """Return the whole body, unpacked; its bytes are held while they arrive, until the holding is given back.

        Raises HttpError when it is too large or does not come in time, and Overloaded when it may not be held.
        """
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if int(declared) > _MAX_DROPPED * self._max_body_bytes:
            raise self._too_large()
        holding.on_revoked = lambda refused: self._refuse_body(refused.error())
        self._holding.set_result(holding)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._body)
            body = b"".join(self._chunks)
        except TimeoutError:
            raise HttpError(f"the body did not come within {timeout_s:g} s", REQUEST_TIMEOUT) from None
        finally:
            self._chunks.clear()  # a request may run for an hour
        encoding = encoding_of(self.headers)
        if encoding is None:
            return body
        return await unpacked(body, encoding, holding, too_large=self._too_large(), most_bytes=self._max_body_bytes)

    def _refuse_body(self, error: KvrelayError) -> None:
        if not self._body.done():
            self._body.set_exception(error)
            self._body.exception()  # mark as retrieved: the handler may have ended

    def _too_large(self) -> HttpError:
        limit = f"the {self._max_body_bytes} bytes of router.max_message_mib"
        return HttpError(f"the body is larger than {limit}", TOO_LARGE)

    async def write(self, events: bytes) -> None:
        """Send a part of a stream of events; the first one begins the response. Waits for a slow reader.

        Raises CancelledError when the client has left.
        """
        self._is_silent = False
        if not self.status:
            await self._start(200, _EVENTS)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        if self.is_gone:
            raise asyncio.CancelledError  # as the handler is going to be: what still waits has no reader

    async def write_parts(self, parts: Iterable[str]) -> None:
        """Send events like `write`, giving way while they are made; nothing where they are empty."""
        if events := b"".join(await self._made(parts)):
            await self.write(events)

    async def show_life(self) -> None:
        """Write to a stream whenever it has been silent for a while, until cancelled; this may begin the response."""
        while True:
            self._is_silent = True
            await asyncio.sleep(SILENCE_S)
            if self._is_silent:
                await completed(self.write(self._dialect.sign_of_life))

    def finish(self, last: Iterable[str]) -> None:
        """Set the last events of a stream, in parts that are made later."""
        self._last = last

    def finish_json(self, value: Any) -> None:
        """Set the whole response."""
        self.finish_parts(json_parts(value))

    def finish_parts(self, parts: Iterable[str]) -> None:
        """Set the whole response: parts of JSON, each made within some milliseconds."""
        self._document = (parts, JSON)

    def finish_body(self, body: bytes, content_type: str) -> None:
        """Set the whole response."""
        self._document = ((body,), [(b"content-type", content_type.encode())])

    async def close(self) -> None:
        """Send what was set, and end the response.

        Raises Overloaded, before the response begins, when the tenant has too many whole answers unread.
        """
        if self._document is not None:
            parts, headers = self._document
            with self.unread as unread:
                await self.respond(200, await self._made(_held(parts, unread)), headers)
            return
        await self.write(b"".join(await self._made(self._last)))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _made(self, parts: Iterable[str | bytes]) -> list[bytes]:
        """Make the parts, giving way."""
        made: list[bytes] = []

        def add(part: str | bytes) -> None:
            made.append(part.encode() if isinstance(part, str) else part)

        await for_each(parts, add, self.pause)
        return made

    def break_off(self) -> None:
        """Break the connection, whose client reads too slowly while other tenants need the memory."""
        self.scope["state"]["connection"].drop()

    async def respond(self, status: int, parts: Sequence[bytes], headers: Headers) -> None:
        """Send a whole response."""
        await self._start(status, [*headers, (b"content-length", b"%d" % sum(map(len, parts)))])
        whole = b"".join(parts)
        sent = 0
        while sent == 0 or sent < len(whole):
            chunk = whole[sent : sent + _CHUNK_BYTES]
            sent += _CHUNK_BYTES  # a slow reader's socket holds few
            await self._send({"type": "http.response.body", "body": chunk, "more_body": sent < len(whole)})

    async def fail(self, error: KvrelayError) -> None:
        """Report an error: as the status, or in mid-stream as an event on which clients raise, without `[DONE]`."""
        body = self._dialect.error_body(error)
        if not self.status:
            await self.respond(kind_of(error).status, [body], [*JSON, *error_headers(error)])
            return
        events_of = self.failure_events
        self.finish(((self._dialect.event_open + body + b"\n\n").decode(),) if events_of is None else events_of(error))
        await self.close()

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        headers = [*headers, *warning_headers(self.left_out)]
        if self.request_id is not None:
            headers = [*headers, (self._dialect.request_id_header, self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _held(parts: Iterable[str | bytes], holding: Holding | None) -> Iterator[str | bytes]:
    """Yield parts that are held from then on. Raises Overloaded when they may not be."""
    for part in parts:
        if holding is not None and (refused := holding.grow(len(part))) is not None:
            raise refused.error()
        yield part

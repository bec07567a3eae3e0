"""One HTTP request and its response, over raw ASGI.

`listen` receives the body and the disconnect. It runs beside the handler, so that a client that leaves is noticed in
every state of its request. The handler sends the parts of a stream as they come, and states the end of the response
by `finish`: after a complete response the server reports a disconnect as well.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from common.errors import KvrelayError
from common.ids import RequestId
from router.http.errors import OPENAI, REQUEST_TIMEOUT, TOO_LARGE, Dialect, Headers, HttpError, error_headers, kind_of

JSON: Headers = [(b"content-type", b"application/json")]
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not gather tokens
]
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
        self._body: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._last = b""
        self._document: tuple[bytes, Headers] | None = None
        self.scope = scope
        self.method: str = scope["method"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.request_id: RequestId | None = None
        """Sent in a header once it is set."""
        self.status = 0
        """Status of the response; 0 before it begins."""
        self.is_gone = False
        """Whether the client has left."""
        self.failure_events: Callable[[KvrelayError], bytes] | None = None
        """Returns the last events of a stream that fails; None: one event with the error."""

    @property
    def metadata(self) -> list[tuple[str, str | bytes]]:
        """The headers that the doorkeeper reads; without `authorization` a key may be in `x-api-key`."""
        given: list[tuple[str, str | bytes]] = [
            (name.decode("latin-1"), value) for name, value in self.headers if name == b"authorization"
        ]
        return given or [("authorization", b"Bearer " + value) for name, value in self.headers if name == b"x-api-key"]

    @property
    def traceparent(self) -> str:
        """The client's place in a trace (common/tracing.py); empty without one."""
        return next((value.decode("latin-1") for name, value in self.headers if name == b"traceparent"), "")

    async def listen(self) -> None:
        """Receive the body; returns when the client leaves."""
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
                return
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            is_over = not message.get("more_body", False)
            if num_bytes <= self._max_body_bytes:
                chunks.append(chunk)
                if is_over and not self._body.done():
                    self._body.set_result(b"".join(chunks))
                continue
            chunks.clear()  # the rest is read all the same: the client reads no answer before it has sent it
            if (is_over or num_bytes > _MAX_DROPPED * self._max_body_bytes) and not self._body.done():
                self._body.set_exception(self._too_large())
                self._body.exception()  # mark as retrieved: the handler may have ended

    async def body(self, *, timeout_s: float) -> bytes:
        """Return the whole body. Raises HttpError when it is too large or does not come in time."""
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if int(declared) > _MAX_DROPPED * self._max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._body)
        except TimeoutError:
            raise HttpError(f"the body did not come within {timeout_s:g} s", REQUEST_TIMEOUT) from None

    def _too_large(self) -> HttpError:
        return HttpError(f"the body is larger than {self._max_body_bytes} bytes", TOO_LARGE)

    async def write(self, events: bytes) -> None:
        """Send a part of a stream of events; the first one begins the response. Waits for a slow reader."""
        if not self.status:
            await self._start(200, _EVENTS)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    def finish(self, last: bytes) -> None:
        """Set the last events of a stream."""
        self._last = last

    def finish_json(self, value: Any) -> None:
        """Set the whole response."""
        self._document = (json.dumps(value).encode(), JSON)

    def finish_body(self, body: bytes, content_type: str) -> None:
        """Set the whole response."""
        self._document = (body, [(b"content-type", content_type.encode())])

    async def close(self) -> None:
        """Send what was set, and end the response."""
        if self._document is not None:
            await self.respond(200, *self._document)
            return
        await self.write(self._last)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole response."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: KvrelayError) -> None:
        """Report an error: as the status, or in mid-stream as an event on which clients raise, without `[DONE]`."""
        body = self._dialect.error_body(error)
        if not self.status:
            await self.respond(kind_of(error).status, body, [*JSON, *error_headers(error)])
            return
        told = self.failure_events
        self.finish(self._dialect.event_open + body + b"\n\n" if told is None else told(error))
        await self.close()

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        if self.request_id is not None:
            headers = [*headers, (self._dialect.request_id_header, self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

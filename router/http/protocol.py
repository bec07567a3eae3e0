"""One connection: uvicorn's HTTP protocol, with bounds on the memory and time that any client can take.

- httptools collects the head of a request without a limit: here it has one.
- Requests that arrive before earlier ones are answered (pipelining) wait. uvicorn takes any number of them. Here at
  most `MAX_PIPELINED` wait; the following ones are not read, and the connection ends with the last answer, so that the
  client sends the rest again.
- uvicorn reports a client's departure to the last request of a connection, and notices nothing while others wait. Here
  the running request gets the report; those behind it have not begun.
- A client that is silent, or sends a head byte by byte, holds its connection for the times of `Patience`: only a
  complete request ends the wait, not any byte. The time of a body is limited where it is read (exchange.py).
- Malformed HTTP is answered in the form of all errors, and never in the middle of an earlier request's answer.
"""

import asyncio
import socket
from contextlib import suppress

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.connections import Connections, Patience
from router.http.errors import BROKEN_HTTP, HEAD_TOO_LARGE, HttpError, error_body, kind_of
from router.http.old_http import ended_by_close

MAX_HEAD_BYTES = 64 << 10
MAX_PIPELINED = 16
_BODY_HEADERS = (b"content-length", b"transfer-encoding")


_BROKEN = HttpError("this is not HTTP/1.1", BROKEN_HTTP)
_HOST = HttpError("a request has one `host` header", BROKEN_HTTP)
_OLD_BODY = HttpError("HTTP/1.0 has no `transfer-encoding`; send the request as HTTP/1.1", BROKEN_HTTP)
_UPGRADE = HttpError(
    "a body behind an `upgrade` header cannot be read; send the request as plain HTTP/1.1 (in Java: "
    "HttpClient.Version.HTTP_1_1)",
    BROKEN_HTTP,
)


class _StopParsing(Exception):
    """Ends the parsing of a connection."""


def _is_answered(last: RequestResponseCycle) -> bool:
    """Whether an error now would break into the answer of the last request, or be a second answer to it."""
    if last.more_body:
        return last.response_started
    return not last.response_complete


class DoorProtocol(HttpToolsProtocol):
    """One connection. Event loop only.

    Each override says what uvicorn lets pass, and the limit that stands here instead.
    """

    accepted: socket.socket | None = None
    """Socket of the connection, set before the connection is made."""
    _num_head_bytes: int | None = None
    """Bytes of the head that has begun and not ended; None outside a head."""
    _running: RequestResponseCycle | None = None
    """The request that runs or ran last; those that wait behind it are in `pipeline`."""
    _error = _BROKEN
    """Answer to bytes that the parser refuses."""
    _is_deaf = False
    """Whether further bytes are dropped: the connection ends with the last answer."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, *, connections: Connections, patience: Patience
    ) -> None:
        super().__init__(config, state, app_state={"connection": self}, _loop=asyncio.get_running_loop())
        self._connections = connections
        self._patience = patience

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request for `Patience.head_s`; uvicorn waits for ever."""
        super().connection_made(transport)
        self._expect_within(self._patience.head_s)

    def drop(self) -> None:
        """Break the connection at once, also while it is being made: then its first read, or its handshake, ends it."""
        if self.transport is not None:
            self.transport.abort()
        elif self.accepted is not None:
            with suppress(OSError):  # the client has broken it
                self.accepted.shutdown(socket.SHUT_RDWR)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes: at most `MAX_HEAD_BYTES` of a head, and HTTP behind an upgrade that is ignored."""
        if self._is_deaf:
            return
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._stop_reading(HttpError(f"the head is larger than {MAX_HEAD_BYTES} bytes", HEAD_TOO_LARGE))
                return
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:  # an offer, which is ignored
                rest = rest[upgrade.args[0] :]
                continue
            except httptools.HttpParserError:
                self._stop_reading(self._error)
            return

    def on_message_begin(self) -> None:
        """Begin a request: at most `MAX_PIPELINED` wait, and its head takes at most `Patience.head_s`."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _StopParsing
        self._num_head_bytes = 0
        if self.cycle is not None and not self._is_working:
            self._expect_within(self._patience.head_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the head of a request; one that others may read differently is refused (`_fault_of_head`)."""
        self._num_head_bytes = None
        if (fault := self._fault_of_head()) is not None:
            self._error = fault
            raise _StopParsing
        self._unset_keepalive_if_required()
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # else the client's departure would go unnoticed

    def on_message_complete(self) -> None:
        """End a request; one that is answered already leaves its client `Patience.idle_s` for the next."""
        super().on_message_complete()
        self.cycle.more_body = False  # also for a request that was answered before its end
        if self.cycle.response_complete:
            self._expect_within(self._patience.idle_s)
        self._note_turn()

    def on_response_complete(self) -> None:
        """Begin the next waiting request, or wait for one; the rest of one that has begun has `Patience.head_s`."""
        super().on_response_complete()
        is_amid_request = self._num_head_bytes is not None or self.cycle.more_body
        if self.timeout_keep_alive_task is not None and is_amid_request:  # uvicorn has just begun the wait
            self._expect_within(self._patience.head_s)
        self._note_turn()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the running request that its client has left, not the last one; those behind it never begin."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._connections.discard(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Begin a request, and note that it runs; one of HTTP/1.0 is answered without chunks."""
        self._running = cycle
        super()._start_asgi_task(cycle, ended_by_close(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def _fault_of_head(self) -> HttpError | None:
        """Return the error of a head that the parser lets pass, and others may read differently; None without one."""
        names = [name for name, _ in self.headers]
        is_old = self.parser.get_http_version() == "1.0"
        if names.count(b"host") > 1 or not (is_old or b"host" in names):
            return _HOST
        if is_old and b"transfer-encoding" in names:
            return _OLD_BODY
        if self.parser.should_upgrade() and any(name in _BODY_HEADERS for name in names):
            return _UPGRADE  # the parser takes the body for the other protocol
        return None

    @property
    def _is_working(self) -> bool:
        """Whether a complete request is not yet answered."""
        running = self._running
        return running is not None and not running.more_body and not running.response_complete

    def _note_turn(self) -> None:
        if self._is_working:
            self._connections.works(self)
        else:
            self._connections.waits(self)

    def _expect_within(self, timeout_s: float) -> None:
        """Close the connection unless the head of a request is complete in time."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(timeout_s, self.timeout_keep_alive_handler)

    def _stop_reading(self, error: HttpError) -> None:
        """Read no more: end the connection after the last complete request, or at once with an error."""
        self._is_deaf = True
        last, running = self.cycle, self._running
        if running is not None and self.pipeline and last.more_body:  # the broken body is that of a waiting request
            self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else running
        if running is None or not _is_answered(last):
            self._refuse(error)
        elif last.response_complete:
            self.transport.close()
        else:
            last.keep_alive = False

    def _refuse(self, error: HttpError) -> None:
        body = error_body(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[kind_of(error).status] + head + body)
        self.transport.close()

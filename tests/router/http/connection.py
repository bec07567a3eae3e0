"""One connection of the HTTP API without a network: bytes in, bytes out, and timers that the test runs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http.connections import Connections, Patience
from router.http.protocol import DoorProtocol

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PATIENCE = Patience(head_s=20, idle_s=75)


class FakeTransport(asyncio.Transport):
    """The server's side of a connection whose client reads everything at once."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 2)})
        self._protocol = protocol
        self.written = bytearray()
        self.is_closed = False
        """Whether either side has closed it."""
        self.over = asyncio.Event()
        """Set when the protocol has lost the connection."""
        self.may_send = asyncio.Event()
        """Set while the server reads."""
        self.may_send.set()

    def leave(self) -> None:
        """Close the connection as its client does."""
        if not self.is_closed:
            self.is_closed = True
            self._lose()

    def write(self, data: Any) -> None:
        if not self.is_closed:
            self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self._protocol.connection_lost(None)
        self.over.set()
        self.may_send.set()

    def is_closing(self) -> bool:
        return self.is_closed

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


class Timers:
    """A loop whose timers the test runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, Callable[..., None], asyncio.Handle]] = []

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> asyncio.Handle:
        handle = asyncio.Handle(call, args, asyncio.get_running_loop())
        self._timers.append((self.now_s + delay_s, call, handle))
        return handle

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self._timers if timer[0] <= self.now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for _at_s, call, handle in due:
            if not handle.cancelled():
                call()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once."""
    body = b"you"
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def silence(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer nothing before the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Connection:
    """A connection that has just been made to `app`; the client leaves at the end of the `async with` block."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]] = answer) -> None:
        config = uvicorn.Config(
            app, ws="none", lifespan="off", interface="asgi3", log_config=None, timeout_keep_alive=PATIENCE.idle_s
        )
        self._connections = Connections(most=16)
        self.protocol = DoorProtocol(config, ServerState(), connections=self._connections, patience=PATIENCE)
        self.timers = Timers()
        self.protocol.loop = self.timers  # type: ignore[assignment]
        self.transport = FakeTransport(self.protocol)
        self._connections.add(self.protocol)
        self.protocol.connection_made(self.transport)

    @property
    def written(self) -> bytes:
        return bytes(self.transport.written)

    @property
    def is_closed(self) -> bool:
        return self.transport.is_closed

    def is_closed_after(self, seconds: float) -> bool:
        self.timers.advance(seconds)
        return self.is_closed

    async def send(self, data: bytes) -> None:
        """Send bytes, and let every request that they begin take its first steps."""
        self.protocol.data_received(data)
        for task in list(self.protocol.tasks):
            await asyncio.wait([task], timeout=0)
            await asyncio.sleep(0)

    async def until_idle(self) -> None:
        """Wait until no request runs."""
        while self.protocol.tasks:
            await asyncio.wait(self.protocol.tasks)
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.transport.leave()
        await self.transport.over.wait()
        await self.until_idle()
        assert self._connections.num_open == 0

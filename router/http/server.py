"""Serves the door's application with uvicorn, on the running event loop. Signals stay with whoever owns the process."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from router.front_door import FrontDoor
from router.http.app import HttpApp
from router.http.protocol import DoorProtocol

_KEEP_ALIVE_S = 75
"""Idle connections of clients are kept as long as their pools keep them, or longer."""
_CLOSE_TIMEOUT_S = 1
"""For connections whose clients do not read their last answer."""
_BACKLOG = 2048
_DATE_S = 1.0
_LINUX_OPTIONS = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    # What was sent is not acknowledged, or the client's window stays closed, for this long (milliseconds).
    "TCP_USER_TIMEOUT": 120_000,
}


class _Uvicorn(uvicorn.Server):
    """Leaves signals alone, and waits to be stopped without looking ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._exit.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # writes the date header
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._exit.wait()


class HttpServer:
    """A started HTTP server. Event loop only."""

    def __init__(self, app: HttpApp, server: _Uvicorn, serving: "asyncio.Task[None]", *, port: int) -> None:
        self.port = port
        self._app = app
        self._server = server
        self._serving = serving

    async def stop(self, grace_s: float) -> None:
        """Report 503, let running requests end for `grace_s` seconds, cancel the rest, close."""
        await self._app.stop(grace_s)
        self._server.stop()
        await self._serving


async def start_http_server(door: FrontDoor, *, host: str, port: int) -> HttpServer:
    """Start serving; port 0 picks a free one. Raises OSError when the port is taken."""
    app = HttpApp(door)
    config = uvicorn.Config(
        app.asgi,
        http=DoorProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    server = _Uvicorn(config)
    listener = _listen(host, port)
    bound = int(listener.getsockname()[1])
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    return HttpServer(app, server, serving, port=bound)


def _notice_dead_clients(listener: socket.socket) -> None:
    """Have the kernel break connections whose client has vanished or does not read; they inherit the options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LINUX_OPTIONS.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError that names the address."""
    try:
        info = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = info[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _notice_dead_clients(listener)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener

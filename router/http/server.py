"""Serves the HTTP application with uvicorn on the running event loop. Signal handling stays with the process."""

import asyncio
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import uvicorn

from common.config import ConfigError
from common.ports import address_of, listen_on
from common.process import claim_open_files, connections_per_listener
from common.trust.doors import DoorCertificates, DoorContext
from router.diagnosis.status import StatusReporter
from router.doors.front_door import FrontDoor
from router.http.app import HttpApp
from router.http.connections import Connections, Patience
from router.http.listener import Listener
from router.http.protocol import DoorProtocol

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1
"""Limit on connections whose clients do not read their last answer."""
_BACKLOG = 2048
_DATE_S = 1.0
_LINUX_OPTIONS = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    # Milliseconds that sent data may stay unacknowledged, or the client's window closed.
    "TCP_USER_TIMEOUT": 120_000,
}


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that leaves signals alone and waits for `stop` instead of polling ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._exit.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers of signals as they are: uvicorn would take SIGINT and SIGTERM from the process."""
        yield

    async def main_loop(self) -> None:
        """Write the date header once a second until `stop`: uvicorn wakes ten times as often."""
        while not await self.on_tick(0):  # writes the date header
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._exit.wait()


class HttpServer:
    """A started HTTP server. Event loop only."""

    def __init__(
        self,
        app: HttpApp,
        server: _Uvicorn,
        listener: Listener,
        *,
        port: int,
    ) -> None:
        self.port = port
        self._app = app
        self._server = server
        self._listener = listener
        self._serving = asyncio.create_task(server.serve(sockets=[]), name="http")

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls with 503, wait up to `grace_s` seconds for running ones, cancel the rest, close."""
        await self._app.stop(grace_s)
        self._listener.close()
        self._server.stop()
        await self._serving


def uvicorn_config(app: HttpApp, patience: Patience) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`."""
    return uvicorn.Config(
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
        timeout_keep_alive=patience.idle_s,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )


async def start_http_server(
    door: FrontDoor,
    reporter: StatusReporter,
    certificates: DoorCertificates | None,
    *,
    host: str,
    port: int,
    names: Sequence[str] = (),
) -> HttpServer:
    """Start serving, with TLS if there are certificates, which have these `names`; port 0 picks a free one.

    Raises OSError when the port is taken, ConfigError for limits that are too large.

    `Listener` accepts the connections that uvicorn serves.
    """
    patience = Patience()
    connections = Connections(most=_most_connections(door.parts.config.max_http_connections))
    app = HttpApp(door, reporter, connections, names)
    config = uvicorn_config(app, patience)
    server = _Uvicorn(config)

    def make_protocol() -> DoorProtocol:
        return DoorProtocol(config, server.server_state, connections=connections, patience=patience)

    tls = None if certificates is None else DoorContext(certificates).newest
    listening = _listen(host, port)
    bound = int(listening.getsockname()[1])
    listener = Listener(listening, connections, make_protocol, tls)
    return HttpServer(app, server, listener, port=bound)


def _most_connections(wanted: int | None) -> int:
    """Return the limit on open connections: the configured one, or as many as fit. Raises ConfigError."""
    open_files = claim_open_files()
    most = connections_per_listener(open_files)
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"{wanted} do not fit: this process may open {open_files} files, of which the HTTP API gets {most};"
            " raise the limit (`ulimit -n`, LimitNOFILE=) or lower the key",
            key="router.max_http_connections",
        )
    chosen = most if wanted is None else wanted
    logger.info("http connections", extra={"max": chosen, "max_open_files": open_files})
    return chosen


def _notice_dead_clients(listener: socket.socket) -> None:
    """Let the kernel break connections whose client has vanished or does not read; they inherit these options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LINUX_OPTIONS.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError that names the address."""
    try:
        listener = listen_on(host, port, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {address_of(host, port)}: {error.strerror or error}") from error
    _notice_dead_clients(listener)
    return listener

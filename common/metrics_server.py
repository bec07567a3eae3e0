"""Serves a process's Prometheus metrics, and whether it gets on, over HTTP, without its event loop.

One thread accepts, and each connection has one.
"""

import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from common.ports import listening_address
from common.watchdog import STANDS_S, Watchdog

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
"""Each connection has a thread. A further one replaces the oldest: scrapes take only a moment."""
_POLL_S = 0.1  # delay of `close`, at most
_SILENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTls:
    """Encryption of scrapes, and the check of their clients."""

    context: ssl.SSLContext
    check: Callable[[ssl.SSLSocket], None]
    """Raises for a client without the right."""


class MetricsServer:
    """Serves one registry, and at `/live` what the watchdog sees, until `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        tls: ScrapeTls | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Start serving, over TLS if `tls` is given; port 0 picks a free one. Raises OSError for a taken port."""
        app = _app(registry, watchdog)
        self._server = make_server(listening_address(host), port, app, _BoundedServer, handler_class=_QuietHandler)
        self._server.tls = tls
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Blocks for a moment: do not call on the event loop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_METRICS_PATHS = ("/metrics", "/", "")


def _app(registry: CollectorRegistry, watchdog: Watchdog | None) -> "WSGIApplication":
    metrics: WSGIApplication = make_wsgi_app(registry)

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path in _METRICS_PATHS:
            return metrics(environ, start_response)
        if watchdog is None or path != "/live":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        standing_s = watchdog.standing_s
        is_live = standing_s < STANDS_S
        start_response("200 OK" if is_live else "503 Service Unavailable", [("Content-Type", "application/json")])
        status = "ok" if is_live else f"the event loop has not turned for {standing_s:.1f} s"
        return [json.dumps({"status": status}).encode()]

    return app


class _BoundedServer(ThreadingWSGIServer):
    """Holds at most `MAX_CONNECTIONS`."""

    request_queue_size = 128

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tls: ScrapeTls | None = None
        self._open: dict[socket.socket, socket.socket] = {}
        """Accepted sockets, the oldest first, each with the socket to read and write: itself, or TLS over it."""
        self._lock = threading.Lock()
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        if ":" in args[0][0]:
            self.address_family = socket.AF_INET6
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread; breaks the oldest one when all places are taken."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                _break([next(iter(self._open.values()))])
        self._room.acquire()
        with self._lock:
            self._open[request] = request
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection, on its thread."""
        if self.tls is not None:
            request.settimeout(_SILENCE_S)
            encrypted = self.tls.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                self._open[request] = encrypted
            encrypted.do_handshake()
            self.tls.check(encrypted)
            request = encrypted
        super().finish_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            is_served = request in self._open
            connection = self._open.pop(request, request)
        super().shutdown_request(connection)
        if is_served:
            self._room.release()

    def server_close(self) -> None:
        """Stop listening, and end open connections."""
        super().server_close()
        with self._lock:
            _break(self._open.values())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that broke or fell silent, at debug level only."""
        logger.debug("scrape failed", exc_info=True)


def _break(connections: Iterable[socket.socket]) -> None:
    """Wake the threads that read or write on connections."""
    for connection in connections:
        with suppress(OSError):  # the client has left
            connection.shutdown(socket.SHUT_RDWR)


class _QuietHandler(WSGIRequestHandler):
    """Handles scrapes without logging them."""

    timeout = _SILENCE_S

    def log_message(self, format: str, *args: object) -> None:
        """Drop the line."""

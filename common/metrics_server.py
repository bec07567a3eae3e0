"""Serves a process's Prometheus metrics over HTTP, on a thread of its own."""

import threading
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

_POLL_S = 0.1  # how late `close` may be noticed


class MetricsServer:
    """Serves one registry until `close`."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        """Start serving; port 0 picks a free one. Raises OSError when the port is taken."""
        app = make_wsgi_app(registry)
        self._server = make_server(host, port, app, ThreadingWSGIServer, handler_class=_QuietHandler)
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Blocks for a moment: not on the event loop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _QuietHandler(WSGIRequestHandler):
    """Logs no scrape."""

    def log_message(self, format: str, *args: object) -> None:
        """Drop the line."""

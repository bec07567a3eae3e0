"""An OpenTelemetry collector that only keeps what it gets: spans as OTLP over HTTP.

`python -m benchmarks.otlp_collector` prints its address and serves until its input ends; `GET /spans` there answers
with the number of spans so far. Bodies are read on request, so that receiving costs next to nothing.
"""

import gzip
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Collector(ThreadingHTTPServer):
    """Takes spans on a free port of this host."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []

    def num_spans(self) -> int:
        """Return the number of spans so far."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        senders = [
            each for body in list(self.bodies) for each in ExportTraceServiceRequest.FromString(body).resource_spans
        ]
        return sum(len(scope.spans) for sender in senders for scope in sender.scope_spans)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(str(self.server.num_spans()).encode())

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


def main() -> None:
    """Serve until standard input ends, as it does with the process that started this one."""
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        print(f"http://127.0.0.1:{collector.server_port}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()

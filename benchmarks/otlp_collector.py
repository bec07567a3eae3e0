"""An OpenTelemetry collector that only keeps: takes spans as OTLP over HTTP, in a process or thread of its own.

`python -m benchmarks.otlp_collector` prints its address; `GET /spans` there answers with the number of spans so far.
Bodies are read on request, so that receiving costs next to nothing.
"""

import gzip
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as a collector sees it; times in nanoseconds since 1970."""

    name: str
    instance: str
    """Process that sent it."""
    span_id: bytes
    parent_id: bytes
    """Empty for the first span of a trace."""
    start_ns: int
    end_ns: int
    error: str
    num_links: int


class Collector(ThreadingHTTPServer):
    """Takes spans on a free port of this host."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        """Value of `tracing.endpoint` for it."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[ReceivedSpan]:
        """Return the spans so far, in the order of their beginnings."""
        found = [span for body in list(self.bodies) for span in _read(body)]
        return sorted(found, key=lambda span: span.start_ns)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(str(sum(1 for body in self.server.bodies for _ in _read(body))).encode())

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


def _read(body: bytes) -> Iterator[ReceivedSpan]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for sender in ExportTraceServiceRequest.FromString(body).resource_spans:
        named = {each.key: each.value.string_value for each in sender.resource.attributes}
        for scope in sender.scope_spans:
            for span in scope.spans:
                errors = (each.value.string_value for each in span.attributes if each.key == "error.type")
                yield ReceivedSpan(
                    name=span.name,
                    instance=named["service.instance.id"],
                    span_id=span.span_id,
                    parent_id=span.parent_span_id,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    error=next(errors, ""),
                    num_links=len(span.links),
                )


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Run a collector on a thread of this process for the block."""
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def main() -> None:
    """Serve until standard input ends, as it does with the process that started this one."""
    with running_collector() as collector:
        print(collector.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()

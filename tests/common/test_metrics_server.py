"""Metrics stay available under other connections."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge

from common.metrics_server import MAX_CONNECTIONS, MetricsServer

NUM_SILENT = 60


@contextmanager
def serving() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("seven", "Seven", registry=registry).set(7)
    server = MetricsServer(registry, host="127.0.0.1", port=0)
    try:
        yield server
    finally:
        server.close()


def scrape(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as response:
        return str(response.read().decode())


@pytest.mark.parametrize("start", [b"", b"GET /metrics HTTP/1.1\r\nx: "])
def test_silent_connections_hold_few_threads_and_shut_no_client_out(start: bytes) -> None:
    before = set(threading.enumerate())
    with serving() as server, ExitStack() as silent:
        for _ in range(NUM_SILENT):
            connection = silent.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            connection.sendall(start)
        assert "seven 7.0" in scrape(server)
        assert len(set(threading.enumerate()) - before) <= 1 + MAX_CONNECTIONS
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
    assert set(threading.enumerate()) <= before


def test_concurrent_scrapes_are_all_answered() -> None:
    with serving() as server:
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(scrape(server))) for _ in range(MAX_CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ["seven 7.0" in text for text in found] == [True] * MAX_CONNECTIONS

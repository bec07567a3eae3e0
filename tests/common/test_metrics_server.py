"""Metrics stay available under other connections."""

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge

from common.metrics_server import MAX_CONNECTIONS, MetricsServer
from common.watchdog import STANDS_S, TICK_S, Watchdog
from tests.clock import ManualClock

NUM_SILENT = 60


@contextmanager
def serving(watchdog: Watchdog | None = None) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("seven", "Seven", registry=registry).set(7)
    server = MetricsServer(registry, host="127.0.0.1", port=0, watchdog=watchdog)
    try:
        yield server
    finally:
        server.close()


def scrape(server: MetricsServer, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as response:
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


@pytest.mark.parametrize("path", ["/live", "/metric", "/status"])
def test_path_that_is_not_served_is_404_and_not_metrics(path: str) -> None:
    with serving() as server, pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(server, path)


async def test_live_is_answered_while_the_event_loop_is_busy_and_says_when_it_stands() -> None:
    clock = ManualClock()
    loop = asyncio.get_running_loop()
    watchdog = Watchdog(
        call_loop=loop.call_soon_threadsafe, waited_s=lambda: 0.0, end=lambda _reason: None, clock=clock
    )

    def pass_time(seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            clock.advance(TICK_S)
            watchdog.check()

    with serving(watchdog) as server:  # this test holds the loop: nothing below would be answered by it
        pass_time(STANDS_S / 2)
        assert scrape(server, "/live") == '{"status": "ok"}'
        pass_time(STANDS_S)
        with pytest.raises(urllib.error.HTTPError) as stands:
            scrape(server, "/live")
        assert stands.value.code == 503
        assert "not turned for 4.5 s" in stands.value.read().decode()
        await asyncio.sleep(0)
        assert scrape(server, "/live") == '{"status": "ok"}'

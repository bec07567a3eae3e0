"""Handlers of the live page: its files, and the state of the cluster as a document or as a stream of events."""

import asyncio
from importlib.resources import files

from router.diagnosis.status import StatusReporter
from router.doors.front_door import FrontDoor
from router.http.errors import FULL, NOT_FOUND, STOPPING, Headers, HttpError
from router.http.exchange import Exchange
from router.http.page.state import StateFeed

MAX_WATCHERS = 16
_RETRY_S = 10.0
PAGE_HEADERS: Headers = [
    (b"content-security-policy", b"default-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]
"""Headers by which a browser runs nothing on the page that this router has not sent, and shows it in no other page."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class PageHandlers:
    """The handlers; each sends a whole response or a stream, or raises KvrelayError."""

    def __init__(self, door: FrontDoor, reporter: StatusReporter) -> None:
        self._door = door
        self._state = StateFeed(door.parts, reporter)
        self._watching: set[asyncio.Task[object]] = set()
        self._is_stopping = False
        folder = files(__package__) / "static"
        self._files = {name: (folder / name).read_bytes() for name in ("page.html", "page.css", "page.js")}

    def stop(self) -> None:
        """End the streams, also to clients that do not read: they would outlast the router's grace."""
        self._is_stopping = True
        for task in self._watching:
            task.cancel()

    async def file(self, name: str, exchange: Exchange) -> None:
        """`GET /`, `/page.css` and `/page.js`: a file of the page."""
        self._check_enabled()
        exchange.finish_body(self._files[name], f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")

    async def cluster(self, exchange: Exchange) -> None:
        """`GET /cluster`: for operators; with `accept: text/event-stream` a new state every second."""
        self._check_enabled()
        self._door.check_operator(exchange.metadata)
        if not any(name == b"accept" and b"text/event-stream" in value for name, value in exchange.headers):
            exchange.finish_body(await self._state.latest(), "application/json")
            return
        if self._is_stopping:
            raise HttpError("the router is stopping", STOPPING)
        if len(self._watching) >= MAX_WATCHERS:
            raise HttpError(f"{MAX_WATCHERS} clients watch already", FULL, retry_after_s=_RETRY_S)
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._watching.add(task)
        try:
            async for event in self._state.events():
                await exchange.write(event)
        finally:
            self._watching.discard(task)

    def _check_enabled(self) -> None:
        """Raise HttpError when the configuration has no page."""
        if not self._door.parts.config.live_page:
            raise HttpError("the live page is off (router.live_page)", NOT_FOUND)

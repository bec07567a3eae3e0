"""Tells a worker when sessions may come back to the blocks of turns that have ended (`ExpectReturns`).

These are hints. They are sent together, one call at a time, so that a slow worker gets fewer calls and not more work;
what a worker cannot take is dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from common.errors import KvrelayError
from kvrelay.v1 import worker_pb2

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Hints for one worker that wait; the oldest go first."""


class ReturnNotes:
    """The hints for one worker. Event loop only. Close with `aclose`."""

    def __init__(self, send: Callable[[worker_pb2.ExpectReturnsRequest], Awaitable[object]]) -> None:
        self._send = send
        self._waiting: deque[worker_pb2.ExpectedReturn] = deque(maxlen=MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def put(self, note: worker_pb2.ExpectedReturn) -> None:
        """Send a hint soon."""
        self._waiting.append(note)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all(), name="return notes")

    async def aclose(self) -> None:
        """Drop what waits."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _send_all(self) -> None:
        while self._waiting:
            request = worker_pb2.ExpectReturnsRequest(returns=self._waiting)
            self._waiting.clear()
            try:
                await self._send(request)
            except KvrelayError as error:
                logger.debug("hints about returns are lost", extra={"error": str(error)})

"""What goes out to one client.

`put` never waits, so that a token that was counted as delivered cannot be lost to a cancellation at the same moment.
Whoever produces waits in `room` before reading on, so a slow client slows its own workers and nobody else.
"""

import asyncio
from collections import deque

from common.errors import KvrelayError
from kvrelay.v1 import inference_pb2

SOFT_LIMIT = 64


class Outbox:
    """A queue between a request and its client's stream. Event loop only."""

    def __init__(self) -> None:
        self._messages: deque[inference_pb2.GenerateResponse] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._is_closed = False
        self._error: KvrelayError | None = None

    def put(self, message: inference_pb2.GenerateResponse) -> None:
        """Append a message."""
        assert not self._is_closed, "a message after the end"
        self._messages.append(message)
        self._changed.set()
        if len(self._messages) >= SOFT_LIMIT:
            self._room.clear()

    async def room(self) -> None:
        """Wait until the client has taken enough."""
        await self._room.wait()

    def close(self, error: KvrelayError | None) -> None:
        """End the stream, with an error or well."""
        self._is_closed = True
        self._error = error
        self._changed.set()

    async def get(self) -> inference_pb2.GenerateResponse | None:
        """Return the next message, or None at the end; then see `error`."""
        while not self._messages:
            if self._is_closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        if len(self._messages) < SOFT_LIMIT:
            self._room.set()
        return message

    @property
    def error(self) -> KvrelayError | None:
        """How the request failed; None while it runs and after a good end."""
        return self._error

"""Control messages of the simulated network, and the inbox at each end of a call."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import grpc

EOF = grpc.aio.EOF


@dataclass(frozen=True, slots=True)
class Status:
    """The end of a call."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class HalfClose:
    """The client has written its last message."""


OK = Status(grpc.StatusCode.OK)
CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
HANDLER_CANCELLED = Status(grpc.StatusCode.CANCELLED, "the handler was cancelled")
TOO_LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """Hosts, method and deadline of a call."""

    source: str
    target: str
    method: str
    deadline_s: float | None
    metadata: tuple[tuple[str, Any], ...] = ()


class Inbox:
    """Messages that have arrived. One reader at a time."""

    __slots__ = ("_loop", "_messages", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: object) -> None:
        """Append a message that has arrived."""
        self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __len__(self) -> int:
        return len(self._messages)

    def clear(self) -> None:
        """Drop all unread messages."""
        self._messages.clear()

    def pop(self) -> Any:
        """Return the oldest message."""
        return self._messages.popleft()

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        self._waiter = self._loop.create_future()
        await self._waiter

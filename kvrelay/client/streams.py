"""Streams of events, blocking and asyncio: one call at a time, the next one where the last broke."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

import grpc

from common.errors import Cancelled, EngineFault
from common.rpc import is_cancelled
from kvrelay.client.convert import error_from_rpc
from kvrelay.client.direct import TailLost
from kvrelay.client.events import SampleSoFar
from kvrelay.client.failover import Attempts, RouterList

_MAX_LOST_TAILS = 3
"""Times that one stream asks for tokens that were lost with a worker after its answer was complete."""

_T = TypeVar("_T")
Send = Callable[[str, Any, Sequence[SampleSoFar]], Any]
"""Sends a request to the router of an address and returns the call; a resumed request comes with what has arrived."""


class Buffer(Generic[_T]):
    """Events of a stream that have arrived and were not taken yet. `drop` may come from any thread."""

    def __init__(self) -> None:
        self.has_ended = False
        """No further message will be read: the stream ended, failed or was closed."""
        self._pending: deque[_T] = deque()

    def feed(self, message: Any) -> bool:
        """Take one message; returns whether the answer has progressed by it. Raises KvrelayError."""
        raise NotImplementedError

    def take(self) -> _T | None:
        """Return the next event, None when a message must be read first."""
        return self._pending.popleft() if self._pending else None

    def take_all(self) -> tuple[_T, ...]:
        """Return all events that were received and not yet taken."""
        taken = tuple(self._pending)
        self._pending.clear()
        return taken

    def finish(self) -> None:
        """Note the regular end. Raises EngineFault when something is missing."""
        self.has_ended = True

    def drop(self) -> None:
        """Note a close or a failure: `take` returns nothing more."""
        self.has_ended = True
        self._pending.clear()

    def resumed(self, request: Any) -> Any:
        """Return the request for what is still missing."""
        return request

    def so_far(self) -> tuple[SampleSoFar, ...]:
        """Return what has arrived of the samples."""
        return ()


class _Stream(Generic[_T]):
    """One request: its current call, its attempts, and the events that have arrived."""

    def __init__(self, send: Send, request: Any, routers: RouterList, events: Buffer[_T]) -> None:
        self._send = send
        self._request = request
        self._attempts = Attempts(routers)
        self._events = events
        self._num_lost_tails = 0
        self._start()

    def _start(self) -> None:
        """Call the current router for what is still missing."""
        self._address = self._attempts.routers.current
        self._call = self._send(self._address, self._events.resumed(self._request), self._events.so_far())

    def _receive(self, message: Any) -> None:
        """Take the next message, None at the regular end. Raises EngineFault."""
        self._attempts.answered()
        if message is None:
            self._events.finish()
        elif self._events.feed(message):
            self._attempts.succeeded()

    def _failed(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next attempt. Raises KvrelayError when another one cannot help."""
        return self._attempts.failed(error_from_rpc(error, address=self._address), address=self._address)

    def _resume(self) -> None:
        """Ask for the tokens that a worker took with it. Raises EngineFault when that has happened too often."""
        self._num_lost_tails += 1
        if self._num_lost_tails > _MAX_LOST_TAILS:
            raise EngineFault("the last tokens could not be fetched from any decode worker")
        self._start()

    def _cancel(self) -> None:
        """Cancel the request unless it has ended."""
        if not self._events.has_ended:
            self._events.drop()
            self._call.cancel()


class BlockingStream(_Stream[_T], Iterator[_T]):
    """Events as they arrive. Iterate in one thread; `close` from any.

    Closing it, leaving its `with` block or dropping the last reference (as `break` does in
    `for event in client.stream(…)`) cancels the request at once: the cluster stops computing it.
    """

    def __init__(self, send: Send, request: Any, routers: RouterList, events: Buffer[_T]) -> None:
        self._closed = threading.Event()
        super().__init__(send, request, routers, events)

    def __next__(self) -> _T:
        """Return the next event. Raises StopIteration at the end and after `close`, KvrelayError on failure."""
        while (event := self._events.take()) is None:
            if self._events.has_ended:
                raise StopIteration
            self._read()
        return event

    def close(self) -> None:
        """Cancel the request unless it has ended. Repeating it is harmless."""
        self._closed.set()
        self._cancel()

    def _start(self) -> None:
        super()._start()
        if self._closed.is_set():  # by another thread, which may not have seen this call
            self._call.cancel()

    def _read(self) -> None:
        """Read one message, or start the next attempt. Raises KvrelayError and closes the stream."""
        try:
            try:
                message = next(self._call, None)
            except grpc.RpcError as error:
                # Another thread may have closed the stream while this one was reading or waiting.
                if not self._events.has_ended and not self._closed.wait(self._failed(error)):
                    self._start()
            else:
                self._receive(message)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncStream(_Stream[_T], AsyncIterator[_T]):
    """Events as they arrive. Belongs to the event loop that made it.

    Closing it, leaving its `async with` block, cancelling the task that reads it or dropping the last reference (as
    `break` does in `async for event in client.stream(…)`) cancels the request at once: the cluster stops computing it.
    """

    async def __anext__(self) -> _T:
        """Return the next event. Raises StopAsyncIteration at the end and after `aclose`, KvrelayError on failure."""
        while (event := self._events.take()) is None:
            if self._events.has_ended:
                raise StopAsyncIteration
            await self._read()
        return event

    async def next_batch(self) -> tuple[_T, ...]:
        """Return the next event and all others that have come with it; () at the end. Raises KvrelayError."""
        first = await anext(self, None)
        return () if first is None else (first, *self._events.take_all())

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Repeating it is harmless."""
        self._cancel()

    async def _read(self) -> None:
        """Read one message, or start the next attempt. Raises KvrelayError and closes the stream."""
        try:
            try:
                message = await unless_closed(anext(aiter(self._call), None))
            except grpc.RpcError as error:
                await asyncio.sleep(self._failed(error))
                if not self._events.has_ended:  # else it was closed meanwhile
                    self._start()
            except TailLost:
                if not self._events.has_ended:
                    self._resume()
            except Cancelled:
                if not self._events.has_ended:
                    raise
            else:
                self._receive(message)
        except BaseException:
            self._cancel()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel()

    def __del__(self) -> None:
        # grpc's iterator and call hold each other: without this the request would run until the next cycle collection
        if not self._events.has_ended and not self._call.done():
            try:
                self._cancel()
            except RuntimeError:  # the loop is closed, and the channel with it
                return


async def unless_closed(reply: Awaitable[_T]) -> _T:
    """Return what a call brings. Raises Cancelled when another task has closed the call.

    grpc reports that as if the task that waits were cancelled.
    """
    try:
        return await reply
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise Cancelled("the client was closed during the call") from None

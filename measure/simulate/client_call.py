"""The client's end of a call on the simulated network, like a call of grpc.aio.

It is awaited (unary), iterated or read (streams), written to, cancelled. Cancelling a task that waits for a message
cancels the call. A call that was cancelled here raises CancelledError; one that failed otherwise raises AioRpcError.
"""

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Protocol

import grpc

from measure.simulate.wire import CANCELLED, EOF, TOO_LATE, CallTerms, HalfClose, Inbox, Status, Wire


class ServerEnd(Protocol):
    """The server's end of a call, as the client's end knows it."""

    @property
    def is_over(self) -> bool:
        """Whether the handler has ended."""

    def deliver(self, message: object) -> None:
        """Take a message that has arrived."""

    def abandon(self) -> None:
        """Cancel the handler: the client is gone."""


class ClientCall:
    """The client's end of a call."""

    def __init__(self, wire: Wire, terms: CallTerms, *, on_over: Callable[["ClientCall"], None]) -> None:
        self.terms = terms
        self.served_by: ServerEnd | None = None
        self._wire = wire
        self._on_over = on_over
        self._inbox = Inbox(wire.loop)
        self._status: Status | None = None
        self._is_half_closed = False
        self._last_request_s = self._last_response_s = 0.0
        self._callbacks: list[Callable[[Any], None]] = []
        self._timer = None
        if terms.deadline_s is not None:
            self._timer = wire.loop.call_at(terms.deadline_s, self._end_early, TOO_LATE)

    # Called by users of the stubs.

    def __await__(self) -> Generator[Any, None, Any]:
        return self._unary().__await__()

    def __aiter__(self) -> "ClientCall":
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """Return the next message, or EOF at a good end. Raises CancelledError or AioRpcError at a bad one."""
        inbox = self._inbox
        while not inbox:
            if self._status is not None:
                self._raise_unless_ok(self._status)
                return EOF
            try:
                await inbox.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return inbox.pop()

    async def write(self, message: object) -> None:
        """Send a request. Raises InvalidStateError when the call is over."""
        if self.is_over or self._is_half_closed:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._wire.send(self, message, is_request=True, deliver=self._to_server)

    async def done_writing(self) -> None:
        """Tell the server that no more requests come."""
        if not self.is_over and not self._is_half_closed:
            self._is_half_closed = True
            self._wire.send(self, HalfClose(), is_request=True, deliver=self._to_server)

    def cancel(self) -> bool:
        """End the call here at once, and at the server a latency later."""
        return self._end_early(CANCELLED)

    def cancelled(self) -> bool:
        """Return whether the call was cancelled here."""
        return self._status is CANCELLED

    def done(self) -> bool:
        """Return whether the call is over."""
        return self.is_over

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        deadline_s = self.terms.deadline_s
        return None if deadline_s is None else max(deadline_s - self._wire.loop.time(), 0.0)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call back when the call is over."""
        if self.is_over:
            callback(self)
        else:
            self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        """Wait for the end and return its code."""
        while self._status is None:
            await self._inbox.wait()
        return self._status.code

    # Called by the network.

    @property
    def is_over(self) -> bool:
        """Whether the end of the call has arrived; messages before it may be unread."""
        return self._status is not None

    def in_order(self, arrives_s: float, *, is_request: bool) -> float:
        """Return the earliest time of arrival behind all earlier messages of the direction."""
        if is_request:
            self._last_request_s = arrives_s = max(arrives_s, self._last_request_s)
        else:
            self._last_response_s = arrives_s = max(arrives_s, self._last_response_s)
        return arrives_s

    def deliver(self, message: object) -> None:
        """Take a response, or the status after the last one."""
        if isinstance(message, Status):
            self.finish(message)
        elif self._status is None:
            self._inbox.put(message)

    def finish(self, status: Status) -> None:
        """End the call on this side. Repeating it is harmless."""
        if self._status is not None:
            return
        self._status = status
        self._inbox.wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_over(self)
        if self.served_by is None or self.served_by.is_over:
            self._wire.forget(self)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def break_off(self, address: str) -> None:
        """End the call on both sides: the connection to a host is lost."""
        self.lose_server()
        self.lose_client(address)
        self._wire.forget(self)

    def lose_client(self, address: str) -> None:
        """End this side alone."""
        self.finish(Status(grpc.StatusCode.UNAVAILABLE, f"connection to {address} was lost"))

    def lose_server(self) -> None:
        """End the server's side alone."""
        if self.served_by is not None:
            self.served_by.abandon()

    def _end_early(self, status: Status) -> bool:
        if self._status is not None:
            return False
        self._inbox.clear()
        self.finish(status)
        self._wire.send(self, status, is_request=True, deliver=self._to_server)
        return True

    def _to_server(self, message: object) -> None:
        if self.served_by is not None:
            self.served_by.deliver(message)
        elif isinstance(message, Status):
            self._wire.forget(self)

    def _raise_unless_ok(self, status: Status) -> None:
        if status is CANCELLED:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            trailing = grpc.aio.Metadata(*status.trailing)
            raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details, status.details)

    async def _unary(self) -> Any:
        response = await self.read()
        if response is EOF:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "no response", ""
            )
        await self.read()  # the status
        return response

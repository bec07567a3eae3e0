"""The two sides of a call on the simulated network, as grpc.aio shows them.

Client: `ClientCall` is awaited (unary), iterated or read (streams), written to, cancelled. Cancelling a task that waits
for a message cancels the call, as in grpc.aio; a call that was cancelled here raises CancelledError, one that ended
otherwise AioRpcError.
Server: `ServerCall` runs the handler in a task and is its context. A client that cancels, goes away or lets its
deadline pass cancels that task.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

if TYPE_CHECKING:
    from simulator.network import SimNetwork

EOF = grpc.aio.EOF
_ENDED = "RPC already finished."


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class _HalfClose:
    """The client has written its last message."""


OK = Status(grpc.StatusCode.OK)
_CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
_HANDLER_CANCELLED = Status(grpc.StatusCode.CANCELLED, "the handler was cancelled")
_TOO_LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """Who calls whom for what, until when."""

    source: str
    target: str
    method: str
    deadline_s: float | None


class _Inbox:
    """Messages that have arrived; one reader at a time."""

    __slots__ = ("_loop", "_messages", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: object) -> None:
        self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __len__(self) -> int:
        return len(self._messages)

    def clear(self) -> None:
        self._messages.clear()

    def pop(self) -> Any:
        return self._messages.popleft()

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        self._waiter = self._loop.create_future()
        await self._waiter


class ClientCall:
    """A call as its client sees it."""

    def __init__(self, network: "SimNetwork", terms: CallTerms, *, on_over: Callable[["ClientCall"], None]) -> None:
        self.terms = terms
        self.served_by: ServerCall | None = None
        self._network = network
        self._on_over = on_over
        self._inbox = _Inbox(network.loop)
        self._status: Status | None = None
        self._is_half_closed = False
        self._last_request_s = self._last_response_s = 0.0
        self._callbacks: list[Callable[[Any], None]] = []
        self._timer = None
        if terms.deadline_s is not None:
            self._timer = network.loop.call_at(terms.deadline_s, self._end_early, _TOO_LATE)

    # What stubs' users call.

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
        """Return the next message, or EOF at a good end. Raises CancelledError or AioRpcError at another one."""
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
            raise asyncio.InvalidStateError(_ENDED)
        self._network.send(self, message, is_request=True, deliver=self._to_server)

    async def done_writing(self) -> None:
        """Tell the server that nothing more comes."""
        if not self.is_over and not self._is_half_closed:
            self._is_half_closed = True
            self._network.send(self, _HalfClose(), is_request=True, deliver=self._to_server)

    def cancel(self) -> bool:
        """End the call here, and at the server when the news has got there."""
        return self._end_early(_CANCELLED)

    def cancelled(self) -> bool:
        """Whether it was cancelled here."""
        return self._status is _CANCELLED

    def done(self) -> bool:
        """Whether it is over."""
        return self.is_over

    def time_remaining(self) -> float | None:
        """Return the seconds until its deadline."""
        deadline_s = self.terms.deadline_s
        return None if deadline_s is None else max(deadline_s - self._network.loop.time(), 0.0)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call back when it is over."""
        if self.is_over:
            callback(self)
        else:
            self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        """Wait for the end and return its code."""
        while self._status is None:
            await self._inbox.wait()
        return self._status.code

    # What the network calls.

    @property
    def is_over(self) -> bool:
        """Whether its end has come to the client; messages before it may be unread."""
        return self._status is not None

    def in_order(self, arrives_s: float, *, is_request: bool) -> float:
        """Return when a message may arrive at the earliest, behind those before it in its direction."""
        if is_request:
            self._last_request_s = arrives_s = max(arrives_s, self._last_request_s)
        else:
            self._last_response_s = arrives_s = max(arrives_s, self._last_response_s)
        return arrives_s

    def deliver(self, message: object) -> None:
        """A response, or the status behind the last one, has arrived."""
        if isinstance(message, Status):
            self.finish(message)
        elif self._status is None:
            self._inbox.put(message)

    def finish(self, status: Status) -> None:
        """End the call on this side. Harmless when it has ended."""
        if self._status is not None:
            return
        self._status = status
        self._inbox.wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_over(self)
        if self.served_by is None or self.served_by.is_over:
            self._network.forget(self)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def break_off(self, address: str) -> None:
        """The connection is gone, on both sides."""
        status = Status(grpc.StatusCode.UNAVAILABLE, f"connection to {address} was lost")
        if self.served_by is not None:
            self.served_by.abandon()
        self.finish(status)
        self._network.forget(self)

    def _end_early(self, status: Status) -> bool:
        if self._status is not None:
            return False
        self._inbox.clear()
        self.finish(status)
        self._network.send(self, status, is_request=True, deliver=self._to_server)
        return True

    def _to_server(self, message: object) -> None:
        if self.served_by is not None:
            self.served_by.deliver(message)
        elif isinstance(message, Status):
            self._network.forget(self)

    def _raise_unless_ok(self, status: Status) -> None:
        if status is _CANCELLED:
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


class ServerCall(grpc.aio.ServicerContext[Any, Any]):
    """A call as its handler sees it; the handler's context."""

    def __init__(
        self, network: "SimNetwork", call: ClientCall, handler: "grpc.RpcMethodHandler[Any, Any]", request: object
    ) -> None:
        self._network = network
        self._call = call
        self._inbox = _Inbox(network.loop)
        self._status = OK
        self._is_abandoned = False
        self._callbacks: list[Callable[[Any], None]] = []
        self.is_over = False
        self._task = network.loop.create_task(self._status_of(handler, request))
        self._task.add_done_callback(self._ended)

    # What handlers call.

    async def read(self) -> Any:
        """Return the next request, or EOF behind the last one."""
        inbox = self._inbox
        while not inbox:
            await inbox.wait()
        message = inbox.pop()
        if isinstance(message, _HalfClose):
            inbox.put(message)  # so for every further read
            return EOF
        return message

    async def write(self, message: object) -> None:
        """Send a response; KV payload is waited for until it has left."""
        if self._is_abandoned:
            return  # nobody is there; the cancellation of the handler is on its way
        loop = self._network.loop
        left_s = self._network.send(self._call, message, is_request=False, deliver=self._call.deliver)
        if left_s > loop.time():
            await asyncio.sleep(left_s - loop.time())

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status."""
        self._status = Status(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Drop it: nobody of ours reads it."""

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Set what goes out with the status."""
        self._status = Status(self._status.code, self._status.details, tuple(trailing_metadata))

    def invocation_metadata(self) -> Any:
        """Return none."""
        return ()

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the code of the status."""
        self._status = Status(code, self._status.details, self._status.trailing)

    def set_details(self, details: str) -> None:
        """Set the text of the status."""
        self._status = Status(self._status.code, details, self._status.trailing)

    def set_compression(self, compression: grpc.Compression) -> None:
        """Do nothing."""

    def disable_next_message_compression(self) -> None:
        """Do nothing."""

    def peer(self) -> str:
        """Return the client's host."""
        return f"sim:{self._call.terms.source}"

    def peer_identities(self) -> Any:
        """Return none."""
        return None

    def peer_identity_key(self) -> None:
        """Return none."""
        return

    def auth_context(self) -> Any:
        """Return none."""
        return {}

    def time_remaining(self) -> float | None:  # type: ignore[override]
        """Return the seconds until the client's deadline; None without one."""
        return self._call.time_remaining()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call back when the call is over."""
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Whether the client has gone away."""
        return self._is_abandoned

    def done(self) -> bool:
        """Whether the call is over."""
        return self.is_over

    # What the network calls.

    def deliver(self, message: object) -> None:
        """A request, the end of the requests or the client's cancellation has arrived."""
        if isinstance(message, Status):
            self.abandon()
        else:
            self._inbox.put(message)

    def abandon(self) -> None:
        """The client is gone: cancel the handler."""
        if not self._is_abandoned:
            self._is_abandoned = True
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[Status]") -> None:
        self.is_over = True
        if self._call.is_over:
            self._network.forget(self._call)
        if not self._is_abandoned:
            status = _HANDLER_CANCELLED if task.cancelled() else task.result()
            self._network.send(self._call, status, is_request=False, deliver=self._call.deliver)
        for callback in self._callbacks:
            callback(self)

    async def _status_of(self, handler: Any, request: object) -> Status:
        """Run the handler; return how it ended."""
        argument = _Requests(self) if handler.request_streaming else request
        try:
            if handler.response_streaming:
                behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
                responses = behavior(argument, self)
                if hasattr(responses, "__aiter__"):
                    async for response in responses:
                        await self.write(response)
                else:
                    await responses
            else:
                await self.write(await handler.unary_unary(argument, self))
        except grpc.aio.AbortError:
            return self._status
        except Exception as error:  # noqa: BLE001 - the top of a task; grpc.aio does the same
            return Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        return self._status


class _Requests:
    """The requests of a call, to be iterated: no generator, which would have to be finalized when it is left early."""

    def __init__(self, call: ServerCall) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self._call.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

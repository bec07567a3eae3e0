"""The server's end of a call on the simulated network, like a call of grpc.aio.

The handler runs in a task, with the call as its context. The task is cancelled when the client cancels, is gone, or
lets its deadline pass.
"""

import asyncio
from collections.abc import AsyncIterator
from contextvars import Context
from typing import Any, NoReturn

import grpc

from measure.simulate.client_call import ClientCall
from measure.simulate.wire import EOF, HANDLER_CANCELLED, OK, HalfClose, Inbox, Status, Wire


class ServerCall:
    """The server's end of a call, and its handler's context: the part of `grpc.aio.ServicerContext` that ours use."""

    def __init__(
        self,
        wire: Wire,
        call: ClientCall,
        handler: "grpc.RpcMethodHandler[Any, Any]",
        request: object,
        context: Context,
    ) -> None:
        """`context`: that of the handler's task, for it alone."""
        self._wire = wire
        self._call = call
        self._inbox = Inbox(wire.loop)
        self._status = OK
        self._is_abandoned = False
        self.is_over = False
        self._task = wire.loop.create_task(self._status_of(handler, request), context=context)
        self._task.add_done_callback(self._ended, context=context)

    # Called by handlers.

    async def read(self) -> Any:
        """Return the next request, or EOF after the last one."""
        inbox = self._inbox
        while not inbox:
            await inbox.wait()
        message = inbox.pop()
        if isinstance(message, HalfClose):
            inbox.put(message)  # for every further read
            return EOF
        return message

    async def send_initial_metadata(self, _metadata: object) -> None:
        """There are no headers here."""

    async def write(self, message: object) -> None:
        """Send a response and wait until its KV payload has left."""
        if self._is_abandoned:
            return  # the client is gone; the handler is being cancelled
        loop = self._wire.loop
        left_s = self._wire.send(self._call, message, is_request=False, deliver=self._call.deliver)
        if left_s > loop.time():
            await asyncio.sleep(left_s - loop.time())

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status."""
        self._status = Status(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("Locally aborted.")

    def invocation_metadata(self) -> Any:
        """Return the metadata that the client has sent with the call."""
        return self._call.terms.metadata

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None without one."""
        return self._call.time_remaining()

    # Called by the network.

    def deliver(self, message: object) -> None:
        """Take a request, the end of the requests or the client's cancellation."""
        if isinstance(message, Status):
            self.abandon()
        else:
            self._inbox.put(message)

    def abandon(self) -> None:
        """Cancel the handler: the client is gone."""
        if not self._is_abandoned:
            self._is_abandoned = True
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[Status]") -> None:
        self.is_over = True
        if self._call.is_over:
            self._wire.forget(self._call)
        if not self._is_abandoned:
            status = HANDLER_CANCELLED if task.cancelled() else task.result()
            self._wire.send(self._call, status, is_request=False, deliver=self._call.deliver)

    async def _status_of(self, handler: Any, request: object) -> Status:
        """Run the handler and return its status."""
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
    """Iterator over a call's requests. Not a generator, which would need to be finalized when it is left early."""

    def __init__(self, call: ServerCall) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self._call.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

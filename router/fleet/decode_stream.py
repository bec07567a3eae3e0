"""All decode calls to one worker process on one stream.

The worker sends one message per engine step (decode.proto, DecodeMany). Its parts go to their calls in the same turn of
the event loop; a call whose messages are followed (`SharedCall.follow`) handles them right there, without a task in
between. Calls never wait for each other: handlers must not block, and the tokens of a slow client gather in its outbox.

A call ends with its status. Closing a call notifies the worker, which frees everything within one step and one network
delay. When the stream breaks, every call on it fails as if its own connection had broken; the next call opens a new
stream.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import grpc

from common.errors import EngineFault, KvrelayError, WorkerLost, from_rpc_error, from_status_bytes
from common.structured import for_each
from kvrelay.v1 import decode_pb2

logger = logging.getLogger(__name__)

_ENOUGH_BYTES = 1 << 20
"""Size from which a message takes no further call; with its last one it stays far below gRPC's limit."""
Call = grpc.aio.StreamStreamCall[Any, Any]
Handler = Callable[[decode_pb2.DecodeResponse], bool]


class SharedCall:
    """One call on a shared stream. Leaving its `with` block closes the call if it still runs."""

    def __init__(self, stream: "DecodeStream", call_id: int) -> None:
        self._stream = stream
        self._call_id = call_id
        self._messages: deque[decode_pb2.DecodeResponse] = deque()
        self._handle: Handler | None = None
        self._failure: Exception | None = None
        """Exception that the handler raised."""
        self._is_over = False
        self._error: KvrelayError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> decode_pb2.DecodeResponse | None:
        """Return the next message, or None at a good end. Raises the KvrelayError that the peer reported."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return None
            await self._wait()
        return self._messages.popleft()

    async def follow(self, handle: Handler) -> None:
        """Hand over every further message until `handle` returns True or the call ends well. Raises like `receive`.

        `handle` runs as messages arrive, in the middle of other work, so it must be quick. Its exceptions are raised
        here.
        """
        while self._messages:
            if handle(self._messages.popleft()):
                return
        self._handle = handle
        try:
            while self._handle is not None and not self._is_over:
                await self._wait()
        finally:
            self._handle = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._error is not None:
            raise self._error

    def take(self, update: decode_pb2.CallUpdate) -> None:
        """Take this call's part of a step. Called by the stream only."""
        for message in update.responses:
            if self._handle is None:
                self._messages.append(message)
                self._wake()
                continue
            try:
                is_enough = self._handle(message)
            except Exception as failure:  # noqa: BLE001 - the other calls of the step go on; `follow` raises it
                self._failure, is_enough = failure, True
            if is_enough:
                self._handle = None
                self._wake()
        if update.HasField("status_code"):
            self.end(from_status_bytes(update.status) if update.status_code else None)

    def end(self, error: KvrelayError | None) -> None:
        """End the call. Called by the stream only."""
        self._is_over = True
        self._error = error
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stream.close(self._call_id)


class DecodeStream:
    """A stream to one worker process and the calls on it, until `aclose` or a broken connection. Event loop only."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._calls: dict[int, SharedCall] = {}
        self._next_id = 1
        self._outgoing: dict[int, decode_pb2.DecodeManyRequest] = {}
        """The next message of each call that has one, in order; 0 stands for the stream itself."""
        self._has_outgoing = asyncio.Event()
        self.is_over = False
        """Whether the stream has ended, so that no further call can be opened."""
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    def open(self, request: decode_pb2.DecodeRequest) -> SharedCall:
        """Start a call."""
        call_id, self._next_id = self._next_id, self._next_id % 0xFFFFFFFF + 1
        assert call_id not in self._calls, f"call {call_id} is still open after all ids were used"
        call = self._calls[call_id] = SharedCall(self, call_id)
        self._send(decode_pb2.DecodeManyRequest(call_id=call_id, open=request))
        return call

    def close(self, call_id: int) -> None:
        """End a call at the worker, which never hears of one that waits to be opened. Harmless when it has ended."""
        if self._calls.pop(call_id, None) is not None and self._outgoing.pop(call_id, None) is None:
            self._send(decode_pb2.DecodeManyRequest(call_id=call_id, close=decode_pb2.CloseCall()))

    def break_off(self, error: KvrelayError) -> None:
        """Fail all calls with `error` and cancel the stream; what still arrives is dropped."""
        self._end_calls(error)
        self._call.cancel()
        self._tasks[0].cancel()

    def _end_calls(self, error: KvrelayError) -> None:
        self.is_over = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(error)

    async def aclose(self) -> None:
        """Cancel the stream and its calls."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _read(self) -> None:
        error: KvrelayError = WorkerLost("the worker has ended the stream of its calls")
        try:
            async for message in self._call:
                await for_each(message.updates, self._take)
                if message.awaits_acknowledgement:
                    self._send(decode_pb2.DecodeManyRequest(acknowledgement=decode_pb2.Acknowledgement()))
        except grpc.aio.AioRpcError as caught:
            error = from_rpc_error(caught)
        except Exception as caught:  # top of a task: no message of a worker may leave its calls waiting
            logger.exception("reading a worker's stream failed")
            error = EngineFault(f"a message of the worker cannot be read: {type(caught).__name__}: {caught}")
            self._call.cancel()
        finally:
            self._tasks[1].cancel()
            self._end_calls(error)

    def _take(self, update: decode_pb2.CallUpdate) -> None:
        call = self._calls.get(update.call_id)
        if call is None:
            return  # closed in the meantime
        call.take(update)
        if update.HasField("status_code"):
            self._calls.pop(update.call_id, None)

    def _send(self, request: decode_pb2.DecodeManyRequest) -> None:
        self._outgoing[request.call_id] = request
        self._has_outgoing.set()

    def _take_outgoing(self) -> decode_pb2.DecodeManyRequest:
        """Return what waits as one message: a write takes a turn of the event loop, and many calls may begin in one."""
        first = self._next_outgoing()
        num_bytes = first.ByteSize()
        while self._outgoing and num_bytes < _ENOUGH_BYTES:
            following = self._next_outgoing()
            num_bytes += following.ByteSize()
            first.others.append(following)
        return first

    def _next_outgoing(self) -> decode_pb2.DecodeManyRequest:
        return self._outgoing.pop(next(iter(self._outgoing)))

    async def _write(self) -> None:
        while await self._has_outgoing.wait():
            if not self._outgoing:
                self._has_outgoing.clear()
                continue
            try:
                await self._call.write(self._take_outgoing())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the stream has ended; the reader reports why
            except Exception as caught:  # top of a task: calls that cannot be sent must not wait
                logger.exception("writing to a worker's stream failed")
                self.break_off(EngineFault(f"a call to the worker cannot be sent: {type(caught).__name__}: {caught}"))
                return

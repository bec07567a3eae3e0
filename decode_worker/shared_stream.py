"""All decode calls of one router on one stream.

The results of an engine step reach the calls' outlets within one callback of the event loop; the writer wakes after it
and sends them as one message. While a message is being written to a slow router, the outlets merge new tokens (see
`Outlet`): no call waits for another one, and nothing is dropped. gRPC calls a message written long before a busy router
takes it, so some await an acknowledgement, and the next of those waits for it: few messages, not thousands of small
ones, are ever before a new one.

A call ends with its status after its last message, or when the router closes it. The stream ends with the router's
connection, which cancels every call on it, or, after `drain`, with its last call.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from common.errors import InvalidRequest, KvrelayError, WorkerLost, to_status_bytes
from common.rpc import to_report
from common.structured import TaskTracker, do_nothing, end_all, for_each
from common.token_batches import MAX_GATHERED_TOKENS, merge_batch, num_tokens_in
from kvrelay.v1 import decode_pb2 as pb

MESSAGES_PER_ACKNOWLEDGEMENT = 4
"""Each message of so many awaits an acknowledgement; at most twice as many are under way."""
MAX_TAKEN = 4
"""Messages that are taken at once."""
_MAX_POSITIONS = 1024
"""Positions of a prompt whose log-probabilities are copied at once, in some milliseconds."""


class Outlet:
    """A call's messages, in order. Tokens that wait are merged into few messages. Event loop only.

    A slow reader costs the memory of its tokens, at most `max_tokens` per sample, and slows no other call. No message
    becomes too large to be sent.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called for every new message."""
        self._messages: list[pb.DecodeResponse] = []
        self._num_gathered = 0
        """Tokens of the last message; `MAX_GATHERED_TOKENS` if it takes no more."""
        self._wake = wake

    @property
    def is_empty(self) -> bool:
        """Whether no message waits."""
        return not self._messages

    def put(self, message: pb.DecodeResponse) -> None:
        """Append a message, which nothing is merged into."""
        self._messages.append(message)
        self._num_gathered = MAX_GATHERED_TOKENS
        self._wake()

    def put_tokens(self, batch: pb.TokenBatch) -> None:
        """Append new tokens."""
        last = self._messages[-1] if self._messages else None
        num_new = num_tokens_in(batch.tokens, batch.runs)
        if last is not None and last.HasField("tokens") and self._num_gathered + num_new <= MAX_GATHERED_TOKENS:
            merge_batch(last.tokens, batch)
            self._num_gathered += num_new
        else:
            self._messages.append(pb.DecodeResponse(tokens=batch))
            self._num_gathered = num_new
        self._wake()

    def take(self) -> list[pb.DecodeResponse]:
        """Remove and return the first `MAX_TAKEN` messages."""
        taken, self._messages = self._messages[:MAX_TAKEN], self._messages[MAX_TAKEN:]
        return taken


Serve = Callable[[pb.DecodeRequest, Outlet], Awaitable[None]]
"""Serves one call into an outlet."""


ENOUGH_BYTES = 4 << 20
"""Size from which a message takes no further call. With its last call it stays far below gRPC's limit: the largest
response has a prompt's log-probabilities (`router.validation.MAX_PROMPT_LOGPROBS_BYTES`)."""


@dataclass(slots=True, eq=False)
class _Call:
    outlet: Outlet
    task: "asyncio.Task[None]" = field(init=False)
    end: tuple[int, bytes] | None = None
    """Status code and details, once the call is over."""


class SharedStream:
    """One DecodeMany call. Event loop only."""

    def __init__(self, serve: Serve, tracker: TaskTracker) -> None:
        self._serve = serve
        self._tracker = tracker
        self._calls: dict[int, _Call] = {}
        self._ready_calls: dict[int, None] = {}
        """Calls with something to send, in order."""
        self._changed = asyncio.Event()
        self._closed: set[asyncio.Task[None]] = set()
        """Tasks of calls that the router has closed, until they end."""
        self._num_written = 0
        self._can_ask = asyncio.Event()
        """Not set while a router that is known to acknowledge messages has yet to do so."""
        self._can_ask.set()
        self._is_acknowledging = False
        self._is_draining = False

    async def run(
        self,
        requests: AsyncIterator[pb.DecodeManyRequest],
        write: Callable[[pb.DecodeManyResponse], Awaitable[None]],
    ) -> None:
        """Serve until the router leaves, or the stream is drained. Raises InvalidRequest."""
        try:
            async with self._tracker.owned(self._read(requests), self._write(write)) as both:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for task in both:
                    if task.done():
                        task.result()
        finally:
            tasks = [*(call.task for call in self._calls.values()), *self._closed]
            await end_all(tasks)

    def drain(self) -> None:
        """Refuse new calls, and end with the last running one."""
        self._is_draining = True
        self._changed.set()

    async def _read(self, requests: AsyncIterator[pb.DecodeManyRequest]) -> None:
        async for first in requests:
            for request in (first, *first.others):
                self._take(request)

    def _take(self, request: pb.DecodeManyRequest) -> None:
        match request.WhichOneof("message"):
            case "open":
                self._open(request.call_id, request.open)
            case "close":
                self._close(request.call_id)
            case "acknowledgement":
                self._is_acknowledging = True
                self._can_ask.set()
            case _:
                raise InvalidRequest("one of open, close and acknowledgement must be set", field="message")

    def _open(self, call_id: int, request: pb.DecodeRequest) -> None:
        if call_id in self._calls:
            raise InvalidRequest(f"call {call_id} is open already", field="call_id")
        call = _Call(Outlet(partial(self._mark_ready, call_id)))
        self._calls[call_id] = call
        if self._is_draining:
            call.task = asyncio.create_task(self._refuse(call_id, call))
        else:
            call.task = asyncio.create_task(self._run(call_id, call, request))

    def _close(self, call_id: int) -> None:
        call = self._calls.pop(call_id, None)
        if call is not None:
            self._ready_calls.pop(call_id, None)
            if self._is_draining:
                self._changed.set()  # it may have been the last one
            self._closed.add(call.task)
            call.task.add_done_callback(self._closed.discard)
            call.task.cancel()

    def _mark_ready(self, call_id: int) -> None:
        if call_id in self._calls:
            self._ready_calls[call_id] = None
            self._changed.set()

    async def _run(self, call_id: int, call: _Call, request: pb.DecodeRequest) -> None:
        error: KvrelayError | None = None
        try:
            await self._serve(request, call.outlet)
        except (Exception, asyncio.CancelledError) as caught:  # noqa: BLE001 - the top of a task
            error = to_report(caught, "Decode")
        self._end(call_id, call, error)

    async def _refuse(self, call_id: int, call: _Call) -> None:
        self._end(call_id, call, WorkerLost("the worker is shutting down"))

    def _end(self, call_id: int, call: _Call, error: KvrelayError | None) -> None:
        call.end = (0, b"") if error is None else to_status_bytes(error)
        self._mark_ready(call_id)

    async def _write(self, write: Callable[[pb.DecodeManyResponse], Awaitable[None]]) -> None:
        while self._calls or not self._is_draining:
            await self._changed.wait()
            # A call whose last token came with this step ends in this turn of the loop: its status is included.
            await asyncio.sleep(0)
            asks = self._num_written % MESSAGES_PER_ACKNOWLEDGEMENT == 0
            if asks:
                await self._can_ask.wait()
            self._changed.clear()
            message = pb.DecodeManyResponse(awaits_acknowledgement=asks)
            await for_each(self._fill(message), do_nothing)
            if message.updates:
                if asks and self._is_acknowledging:
                    self._can_ask.clear()
                self._num_written += 1
                await write(message)

    def _fill(self, message: pb.DecodeManyResponse) -> Iterator[None]:
        """Add an update of each call with something to send, while there is room.

        Yields after each call, and part of one with a prompt's log-probabilities. Calls may change in between.
        """
        unfinished: list[int] = []
        num_bytes = 0
        for call_id in list(self._ready_calls):
            if num_bytes >= ENOUGH_BYTES:
                break
            if call_id not in self._ready_calls:
                continue  # closed in the meantime
            del self._ready_calls[call_id]
            unfinished.append(call_id)
            update = message.updates.add(call_id=call_id)
            for response in self._take_responses(update):
                yield from _move(response, update.responses.add())
            num_bytes += update.ByteSize()
            yield
        for call_id in unfinished:  # after those that have not been sent at all
            if call_id in self._calls and not self._calls[call_id].outlet.is_empty:
                self._ready_calls[call_id] = None
        if self._ready_calls:
            self._changed.set()

    def _take_responses(self, update: pb.CallUpdate) -> list[pb.DecodeResponse]:
        """Return a call's next messages; notes its end in the update when they are the last ones."""
        call = self._calls[update.call_id]
        taken = call.outlet.take()
        if call.end is not None and call.outlet.is_empty:
            update.status_code, update.status = call.end
            del self._calls[update.call_id]
        return taken


def _move(response: pb.DecodeResponse, into: pb.DecodeResponse) -> Iterator[None]:
    """Move a message that nothing else holds; yields between parts of a prompt's log-probabilities."""
    positions = response.tokens.prompt_logprobs
    for first in range(0, len(positions), _MAX_POSITIONS):
        into.tokens.prompt_logprobs.extend(positions[first : first + _MAX_POSITIONS])
        yield
    if positions:
        del positions[:]
    into.MergeFrom(response)

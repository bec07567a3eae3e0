"""Calls at doors that are let in before anybody knows who calls: health, reflection, and what a capability opens.

Such a call costs memory while it waits for its request, which may come byte by byte, or for news, as `Watch` does. So a
bounded number of them is open at a time, on all connections together: one more ends the one that has waited longest.
"""

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import InvalidRequest, KvrelayError, Overloaded
from common.malformed import strict
from common.rpc import abort

MOST_OPEN = 128
_REQUEST_S = 60.0
_RETRY_S = 1.0


class AnonymousCalls:
    """The calls of one listener that are open, and of unknown clients. Event loop only."""

    def __init__(self, *, most: int = MOST_OPEN) -> None:
        self._most = most
        self._open: OrderedDict[asyncio.Task[Any], None] = OrderedDict()

    def bounded(self, handler: Any) -> Any:
        """Return a handler whose calls count from their first byte to their end."""

        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._at_most(self._serve(handler, requests, context), context)

        return grpc.stream_stream_rpc_method_handler(handle, None, handler.response_serializer)

    def read(self, handler: Any) -> Any:
        """Return a handler for one request, whose calls count until that has come."""

        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            request = await self._at_most(_first(handler, requests), context)
            await _answer(handler.unary_stream or handler.unary_unary, request, context)

        return grpc.stream_stream_rpc_method_handler(handle, None, handler.response_serializer)

    async def _serve(self, handler: Any, requests: AsyncIterator[bytes], context: Any) -> None:
        if handler.request_streaming:
            decode = strict(handler.request_deserializer)
            parsed = (decode(each) async for each in requests)
            await _answer(handler.stream_stream or handler.stream_unary, parsed, context)
        else:
            request = await _first(handler, requests)
            await _answer(handler.unary_stream or handler.unary_unary, request, context)

    async def _at_most(self, work: Any, context: Any) -> Any:
        """Return what `work` returns, unless others need its place meanwhile."""
        while len(self._open) >= self._most:
            oldest, _ = self._open.popitem(last=False)
            oldest.cancel()
        task = asyncio.ensure_future(work)
        self._open[task] = None
        try:
            await asyncio.wait([task])
        finally:
            is_evicted = self._open.pop(task, task) is task
            task.cancel()
        error: KvrelayError
        if task.cancelled() and is_evicted:
            error = Overloaded("too many calls of unknown clients are open", retry_after_s=_RETRY_S)
        elif not task.cancelled() and isinstance(refused := task.exception(), KvrelayError):
            error = refused
        else:
            return task.result()
        return await abort(context, error)


async def _first(handler: Any, requests: AsyncIterator[bytes]) -> Any:
    try:
        async with asyncio.timeout(_REQUEST_S):
            raw = await anext(requests, None)
    except TimeoutError:
        raise InvalidRequest(f"the request did not come within {_REQUEST_S:g} s", field="message") from None
    if raw is None:
        raise InvalidRequest("there is no request", field="message")
    return strict(handler.request_deserializer)(raw)


async def _answer(behavior: Any, request: Any, context: Any) -> None:
    """Write what a behavior of any kind answers."""
    answer = behavior(request, context)
    if inspect.isasyncgen(answer):
        async for each in answer:
            await context.write(each)
    elif (response := await answer) is not None:
        await context.write(response)

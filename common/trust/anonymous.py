"""Bounds calls at doors that are admitted before the caller is known: health, reflection, and direct streams.

Such a call costs memory while it waits for its request, which may arrive byte by byte, or for updates, as `Watch` does.
Therefore the number of open ones is bounded over all connections: a further one ends the one that has waited longest.
"""

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import InvalidRequest, KvrelayError, Overloaded
from common.rpc import abort, strict

MOST_OPEN = 128
_REQUEST_S = 60.0
_RETRY_S = 1.0


class AnonymousCalls:
    """Open calls of unknown clients on one listener. Event loop only."""

    def __init__(self) -> None:
        self._open: OrderedDict[asyncio.Task[Any], None] = OrderedDict()

    def bounded(self, handler: Any) -> Any:
        """Return a handler whose calls count from their first byte to their end."""

        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._at_most(self._serve(handler, requests, context), context)

        return grpc.stream_stream_rpc_method_handler(handle, None, handler.response_serializer)

    def read(self, handler: Any) -> Any:
        """Return a handler for one request, whose calls count until the request has arrived."""

        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            request = await self._at_most(_first(handler, requests), context)
            await answer(handler.unary_stream or handler.unary_unary, request, context)

        return grpc.stream_stream_rpc_method_handler(handle, None, handler.response_serializer)

    async def _serve(self, handler: Any, requests: AsyncIterator[bytes], context: Any) -> None:
        if handler.request_streaming:
            decode = strict(handler.request_deserializer)
            parsed = (decode(each) async for each in requests)
            await answer(handler.stream_stream or handler.stream_unary, parsed, context)
        else:
            request = await _first(handler, requests)
            await answer(handler.unary_stream or handler.unary_unary, request, context)

    async def _at_most(self, work: Any, context: Any) -> Any:
        """Return the result of `work`; aborts the call if newer ones need its place."""
        while len(self._open) >= MOST_OPEN:
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


async def first(requests: AsyncIterator[bytes]) -> bytes:
    """Return the one request of a call that is taken as a stream. Raises InvalidRequest when none comes in time."""
    arriving: Any = aiter(requests)
    try:
        async with asyncio.timeout(_REQUEST_S):
            raw: bytes | None = await anext(arriving, None)
    except TimeoutError:
        raise InvalidRequest(f"the request did not come within {_REQUEST_S:g} s", field="message") from None
    finally:
        await arriving.aclose()  # gRPC's generator keeps what it has returned, until garbage is collected
    if raw is None:
        raise InvalidRequest("the request is missing", field="message")
    return raw


async def _first(handler: Any, requests: AsyncIterator[bytes]) -> Any:
    return strict(handler.request_deserializer)(await first(requests))


async def answer(behavior: Any, request: Any, context: Any) -> None:
    """Write the answer of a behavior of any kind."""
    answering = behavior(request, context)
    if inspect.isasyncgen(answering):
        async for each in answering:
            await context.write(each)
    elif (response := await answering) is not None:
        await context.write(response)

"""Calls at the gRPC door: whose they are and what that tenant may comes first, then the request is received and read.

gRPC receives and parses a request before it calls a handler for one, as many at once as clients send. Here a call is
taken as a stream of one request: before its tenant's turn no more arrives than flow control lets through.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from common.errors import InvalidRequest, KvrelayError
from common.metering import Metered
from common.rpc import abort, strict
from common.trust.anonymous import answer, first
from common.wire import check_bounds
from kvrelay.v1 import inference_pb2 as pb
from router.doors.front_door import FrontDoor
from router.doors.readers import INLINE_MESSAGE_BYTES, Reading

_Message = TypeVar("_Message", bound=Message)

MAX_RECEIVING = 32
"""Requests of one tenant that may arrive, or wait to be read, at once; the others wait before that."""


def read_generate(raw: bytes) -> pb.GenerateRequest:
    """Return a checked message. Raises InvalidRequest."""
    return _read(pb.GenerateRequest, raw)


def read_embed(raw: bytes) -> pb.EmbedRequest:
    """Return a checked message. Raises InvalidRequest."""
    return _read(pb.EmbedRequest, raw)


def read_tokenize(raw: bytes) -> pb.TokenizeRequest:
    """Return a checked message. Raises InvalidRequest."""
    return _read(pb.TokenizeRequest, raw)


def _read(kind: type[_Message], raw: bytes) -> _Message:
    message: _Message = strict(kind.FromString)(raw)
    check_bounds(message)
    return message


_READINGS: Mapping[str, Reading[Any]] = {
    "Generate": Reading(read_generate, pb.GenerateRequest, INLINE_MESSAGE_BYTES),
    "Embed": Reading(read_embed, pb.EmbedRequest, INLINE_MESSAGE_BYTES),
    "Tokenize": Reading(read_tokenize, pb.TokenizeRequest, INLINE_MESSAGE_BYTES),
}
"""How requests are read that may be large, by method."""
_CHARGED = frozenset({"Explain", "ListModels", "RecordTraffic"})
"""Other methods of tenants, whose calls wait for a turn and are charged, too; the rest are operators'."""


class Arrivals(grpc.aio.ServerInterceptor):
    """Receives the requests of calls, behind the guard that has screened their callers. Event loop only."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._receiving: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_RECEIVING))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return a handler that receives a request, reads it and passes it on."""
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/kvrelay."):
            return handler
        behavior = handler.unary_stream or handler.unary_unary
        name = method.rpartition("/")[2]
        receive = self._receive if name in _READINGS else self._receive_small

        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            try:
                with self._counted(name):
                    request = await receive(handler, name, requests, context)
            except KvrelayError as error:
                await abort(context, error)
            await answer(behavior, request, context)

        async def metered(requests: AsyncIterator[bytes], context: Any) -> None:
            try:
                await Metered(handle(requests, context))
            except grpc.aio.AbortError as error:
                # gRPC keeps it with the call, until garbage is collected, and with its frames what was received.
                error.__traceback__ = error.__context__ = None
                raise

        return grpc.stream_stream_rpc_method_handler(metered, None, handler.response_serializer)

    async def _receive(self, _handler: Any, name: str, requests: AsyncIterator[bytes], context: Any) -> Any:
        """Return a request that may be large. Raises KvrelayError."""
        door = self._door
        tenant = await door.enter(context.invocation_metadata(), needs_worker=name != "Tokenize")
        with door.arriving(tenant) as holding:
            async with self._receiving[tenant.name]:
                raw = await first(requests)
                if (refused := holding.grow(len(raw))) is not None:
                    raise refused.error()
                return await door.readers.read(_READINGS[name], raw, tenant=tenant)

    async def _receive_small(self, handler: Any, name: str, requests: AsyncIterator[bytes], context: Any) -> Any:
        """Return a request that has few fields. Raises KvrelayError."""
        if name in _CHARGED:
            await self._door.enter(context.invocation_metadata(), needs_worker=False)
        raw = await first(requests)
        if len(raw) > INLINE_MESSAGE_BYTES:
            raise InvalidRequest(
                f"the request has {len(raw)} bytes; at most {INLINE_MESSAGE_BYTES} are taken", field="message"
            )
        return strict(handler.request_deserializer)(raw)

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """Count a request that is refused before its handler runs, which counts all others."""
        try:
            yield
        except KvrelayError:
            if name not in ("Generate", "Embed"):
                raise
            with self._door.account(self._door.new_life()):
                raise

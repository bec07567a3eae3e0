"""Refuses requests that are not valid protobuf with INVALID_ARGUMENT instead of gRPC's bare UNKNOWN.

gRPC deserializes before it calls a handler and answers a failure with a bare status. The interceptor passes the error
on in place of the request and ends the call with it. Messages of a stream are deserialized when the handler reads them,
so the error is raised there.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common.errors import InvalidRequest
from common.rpc import abort, rebuilt


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):
    """Refuses undecodable requests of our own calls (their handlers are coroutines)."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler; a request that cannot be decoded ends its call, or raises where a stream is read."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/kvrelay."):
            return handler
        decode = strict(handler.request_deserializer)
        if handler.request_streaming:
            return rebuilt(handler, lambda behavior: behavior, decode)
        return rebuilt(handler, _refusing, _as_value(decode))


def strict(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that raises only InvalidRequest for bytes that are not a message."""

    def decode(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except (DecodeError, UnicodeDecodeError) as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"not a valid message (strings must be UTF-8): {reason}", field="message") from error

    return decode


def _as_value(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_error(raw: bytes) -> Any:
        try:
            return decode(raw)
        except InvalidRequest as error:
            return error

    return decode_or_error


def _refusing(behavior: Callable[[Any, Any], Any]) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, InvalidRequest):
            await abort(context, request)
        return await behavior(request, context)

    return handle

"""Requests that are no valid protobuf: INVALID_ARGUMENT instead of gRPC's bare UNKNOWN.

gRPC deserializes before it calls a handler, and answers a failure with a status that says nothing. The interceptor lets
such a request through as a marker and refuses it where errors have a form. The messages of a stream are deserialized
where a handler reads them: there the reader gets the error.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from common.errors import InvalidRequest, to_status

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


@dataclass(frozen=True, slots=True)
class _Malformed:
    reason: str

    @property
    def error(self) -> InvalidRequest:
        return InvalidRequest(f"not a valid message (strings must be UTF-8): {self.reason}", field="message")


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):
    """Refuses undecodable requests of our own calls (their handlers are coroutines)."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the handler with a deserializer that raises nothing but InvalidRequest, to who reads a stream."""
        handler: Any = await continuation(handler_call_details)
        is_ours = handler_call_details.method.startswith("/kvrelay.")
        if handler is None or not is_ours:
            return handler  # type: ignore[no-any-return]
        if handler.request_streaming:
            raising = _raising(handler.request_deserializer)
            if handler.response_streaming:
                return grpc.stream_stream_rpc_method_handler(
                    handler.stream_stream, raising, handler.response_serializer
                )
            return grpc.stream_unary_rpc_method_handler(handler.stream_unary, raising, handler.response_serializer)
        deserialize = _tolerant(handler.request_deserializer)
        if handler.response_streaming:
            refusing = _refusing(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(refusing, deserialize, handler.response_serializer)
        refusing = _refusing(handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(refusing, deserialize, handler.response_serializer)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except (DecodeError, UnicodeDecodeError) as error:
            return _Malformed(str(error) or type(error).__name__)

    return parse


def _raising(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    tolerant = _tolerant(deserialize)

    def parse(raw: bytes) -> Any:
        message = tolerant(raw)
        if isinstance(message, _Malformed):
            raise message.error
        return message

    return parse


def _refusing(behavior: Callable[[Any, Any], Any]) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, _Malformed):
            code, message, trailing = to_status(request.error)
            await context.abort(code, message, trailing)
        return await behavior(request, context)

    return handle

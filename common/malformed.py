"""Requests that are no valid protobuf: INVALID_ARGUMENT instead of gRPC's bare UNKNOWN.

gRPC deserializes before it calls a handler, and answers a failure with a status that says nothing. The interceptor lets
such a request through as a marker and refuses it where errors have a form.
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


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):
    """Refuses undecodable requests of our own calls with a single request message (their handlers are coroutines)."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the handler with a deserializer that does not raise."""
        handler: Any = await continuation(handler_call_details)
        is_ours = handler_call_details.method.startswith("/kvrelay.")
        if handler is None or not is_ours or handler.request_streaming:
            return handler  # type: ignore[no-any-return]
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


def _refusing(behavior: Callable[[Any, Any], Any]) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, _Malformed):
            error = InvalidRequest(f"not a valid message (strings must be UTF-8): {request.reason}", field="message")
            code, message, trailing = to_status(error)
            await context.abort(code, message, trailing)
        return await behavior(request, context)

    return handle

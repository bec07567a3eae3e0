"""gRPC functions for every process: channels, deadlines, error mapping. Servers: rpc_server.py."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from common.errors import EngineFault, InvalidRequest, KvrelayError, to_status
from common.ports import is_here

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20
MIN_PING_INTERVAL_MS = 1_000
"""Shortest time between two pings that servers allow."""
_PING_INTERVAL_MS = 2_000
PING_TIMEOUT_MS = 3_000
PINGED_S = (_PING_INTERVAL_MS + PING_TIMEOUT_MS) / 1000
"""Longest time, on a connection that holds, since its peer has answered a ping."""
REPLACEABLE_PING_TIMEOUT_MS = 1_500
"""The same where another peer can take over at once. Three losses of a packet in a row take 1.4 s."""


def keepalive(ping_timeout_ms: int = PING_TIMEOUT_MS) -> list[tuple[str, int]]:
    """Return options by which a peer that stands still, or is cut off, is noticed within 5 s.

    Pings are answered without Python.
    """
    return [
        ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        # A ping that was sent for another reason than keepalive has a limit of its own: a minute.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(*, ping_timeout_ms: int = PING_TIMEOUT_MS, allows_proxy: bool = False) -> list[tuple[str, int]]:
    """Return the options of every client channel. Reconnects within a second: processes restart fast.

    `allows_proxy`: a proxy that the environment names (`http_proxy` and others) is used; calls within a cluster are not
    for it.
    """
    return [
        *keepalive(ping_timeout_ms),
        # Limits an attempt to connect. A process that stands still accepts connections, and never answers the handshake
        # of TLS, during which nothing is pinged yet: calls would wait 20 s.
        ("grpc.min_reconnect_backoff_ms", _PING_INTERVAL_MS + ping_timeout_ms),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", int(allows_proxy)),
    ]


def door_options(address: str, *, ping_timeout_ms: int = PING_TIMEOUT_MS) -> list[tuple[str, int]]:
    """Return the options of a client's channel to a door, which a proxy may lead to unless the door is on this host."""
    host = address.rpartition(":")[0].removeprefix("dns:///")
    return channel_options(ping_timeout_ms=ping_timeout_ms, allows_proxy=not is_here(host))


def client_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    server_name: str = "",
    ping_timeout_ms: int = PING_TIMEOUT_MS,
) -> grpc.aio.Channel:
    """Return a lazy channel to a door, encrypted if credentials are given. Make one per peer and reuse it.

    `server_name`: DNS name that the certificate must have; empty: the host of `address`.
    """
    options: list[tuple[str, str | int]] = [*door_options(address, ping_timeout_ms=ping_timeout_ms)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


@contextmanager
def unix_address(path: Path) -> Iterator[str]:
    """Yield gRPC's address of a Unix socket; for this process, while the block runs. Raises OSError without its folder.

    It names the folder by a descriptor: a socket's path has at most 107 bytes, and an address no character such as "%".
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"unix:/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


Connect = Callable[[str], grpc.aio.Channel]
"""Makes a lazy channel to host:port. Injected, so that a simulated network can replace the real one."""


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KvrelayError) -> NoReturn:
    """End a call with the status of `error`."""
    code, message, trailing = to_status(error)
    error.__traceback__ = None  # gRPC keeps it until garbage is collected, and with its frames what was received
    await context.abort(code, message, trailing)
    raise AssertionError("abort raises")


async def send_headers(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Begin a stream whose messages are written by a task that may be cancelled.

    Headers go with the first message by default. When that is cancelled on its way, gRPC would send them once more with
    the status, fails, and the caller waits for ever.
    """
    await context.send_initial_metadata(())


def rebuilt(handler: Any, behind: Callable[[Any], Any], deserializer: Any) -> Any:
    """Return a handler of the same kind that runs `behind(behavior)` on what `deserializer` returns."""
    make, behavior = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }[handler.request_streaming, handler.response_streaming]
    return make(behind(behavior), deserializer, handler.response_serializer)


def is_cancelled() -> bool:
    """Return whether the running task is being cancelled; if not, a CancelledError comes from what it awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


@asynccontextmanager
async def error_boundary(context: grpc.aio.ServicerContext[Any, Any], what: str) -> AsyncIterator[None]:
    """Turn the exception that ends a handler into one terminal status.

    If the caller has left, the handler ends like a cancelled one.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError as error:  # raised by gRPC for a write before the handler is cancelled
        logger.debug("%s: the caller has left", what, exc_info=error)
        with suppress(grpc.aio.InternalError, grpc.aio.UsageError):  # if it has not, it would wait for a status
            await abort(context, EngineFault(f"{what} failed: a message could not be sent"))
        raise asyncio.CancelledError from None
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the top of a handler
        await abort(context, to_report(error, what))


def to_report(error: Exception | asyncio.CancelledError, what: str) -> KvrelayError:
    """Return the error to report to a caller for an exception that ended `what`; logs foreign exceptions.

    Raises the CancelledError by which the running task is being cancelled.
    """
    if isinstance(error, KvrelayError):
        return error
    if not isinstance(error, asyncio.CancelledError):
        logger.error("%s failed", what, exc_info=error)
        return EngineFault(f"{what} failed: {type(error).__name__}: {error}")
    if is_cancelled():
        raise error
    # An awaited operation was cancelled, such as a call on a closed channel. Unreported, it would end the task without
    # a status, and the caller would wait forever.
    logger.error("%s failed", what, exc_info=error)
    return EngineFault(f"{what} failed: an operation that it awaited was cancelled")


def time_left_s(context: grpc.aio.ServicerContext[Any, Any], *, at_most_s: float) -> float:
    """Return the caller's remaining time, capped."""
    remaining = context.time_remaining()
    return at_most_s if remaining is None else min(remaining, at_most_s)


async def until_ready(channel: grpc.aio.Channel, *, timeout_s: float) -> bool:
    """Return whether `channel` connects within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        changed: Awaitable[None] = channel.wait_for_state_change(state)
        try:
            await asyncio.wait_for(changed, left)
        except TimeoutError:
            return False
        state = channel.get_state(try_to_connect=True)
    return True


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):
    """Refuses requests of our own calls that are not valid protobuf with INVALID_ARGUMENT, not gRPC's bare UNKNOWN.

    gRPC deserializes before it calls a handler. So the error is passed on in place of the request and ends the call.
    Messages of a stream are deserialized when the handler reads them, so the error is raised there.
    """

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

"""Ends of handlers and of attempts to connect, as callers and logs see them (common/rpc.py)."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from common.errors import InvalidRequest
from common.rpc import REPLACEABLE_PING_TIMEOUT_MS, client_channel, error_boundary, send_headers


@asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[grpc.aio.Channel]:
    """Yield a channel to a server of one method. A server that is not stopped would hold its process for ever."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Answer": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def test_write_to_a_caller_that_has_left_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    has_begun, is_over = asyncio.Event(), asyncio.Event()

    async def answer(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            async with error_boundary(context, "Answer"):
                has_begun.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:  # the next write finds the call ended
                    await context.write(b"late")
        finally:
            is_over.set()

    async with asyncio.timeout(60), serving(grpc.stream_stream_rpc_method_handler(answer)) as channel:
        call: Any = channel.stream_stream("/test/Answer")()
        await has_begun.wait()
        call.cancel()
        await is_over.wait()
    # Not what asyncio logs for gRPC's poller, which several event loops of a process may wake at once.
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR and record.name != "asyncio"]
    assert [record.getMessage() for record in errors] == []


async def test_message_that_cannot_be_sent_ends_the_call_of_a_caller_that_is_still_there() -> None:
    async def answer(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with error_boundary(context, "Answer"):
            raise grpc.aio.InternalError

    async with serving(grpc.unary_stream_rpc_method_handler(answer)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            call: Any = channel.unary_stream("/test/Answer")
            await anext(aiter(call(b"", timeout=60)))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_status_arrives_though_the_first_message_was_cancelled_on_its_way() -> None:
    async def answer(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with error_boundary(context, "Answer"):
            await send_headers(context)
            writing = asyncio.ensure_future(context.write(b"first"))
            await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
            raise InvalidRequest("a later request is wrong")

    async with serving(grpc.stream_stream_rpc_method_handler(answer)) as channel:
        call: Any = channel.stream_stream("/test/Answer")(timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_call_to_a_peer_that_accepts_and_never_shakes_hands_soon_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        credentials = grpc.ssl_channel_credentials()
        async with client_channel(address, credentials, ping_timeout_ms=REPLACEABLE_PING_TIMEOUT_MS) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                call: Any = channel.unary_unary("/test/Answer")
                await call(b"", timeout=15)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

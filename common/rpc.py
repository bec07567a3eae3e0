"""gRPC plumbing that every process shares: channels, servers with health and reflection, deadlines, error mapping."""

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import EngineFault, KvrelayError, to_status
from common.malformed import MalformedRequestInterceptor
from common.open_files import claim_open_files, connections_per_door
from common.ports import is_port_free, listen_on_first

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(*, max_message_mib: int = 64) -> list[tuple[str, int]]:
    """Return the options of every client channel. Reconnects within a second: processes come back fast."""
    return [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", max_message_mib * _MIB),
        ("grpc.max_send_message_length", max_message_mib * _MIB),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def client_channel(address: str, *, max_message_mib: int = 64) -> grpc.aio.Channel:
    """Return a lazy channel. One per peer, made once and reused."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_mib=max_message_mib))


Connect = Callable[[str], grpc.aio.Channel]
"""Makes a lazy channel to host:port. Taken from outside, so that a simulated network can take the real one's place."""


@dataclass(slots=True)
class Server:
    """A started gRPC server."""

    grpc_server: grpc.aio.Server
    port: int
    health: health.aio.HealthServicer

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let running calls end for `grace_s` seconds, then cancel them."""
        await self.health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s)


async def start_server(
    add_services: Callable[[grpc.aio.Server], Sequence[str]],
    *,
    host: str,
    port: int | Sequence[int],
    max_message_mib: int = 64,
) -> Server:
    """Start a server with health checking and reflection on the first free one of some ports; 0 is always free.

    `add_services` registers the servicers and returns their full names. Raises OSError when all are taken.
    """
    options = [
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # A client that says nothing is closed; with more of them than fit, new ones are.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 300_000),
        ("grpc.max_concurrent_streams", 4096),
        ("grpc.max_allowed_incoming_connections", connections_per_door(claim_open_files())),
        ("grpc.max_receive_message_length", max_message_mib * _MIB),
        ("grpc.max_send_message_length", 64 * _MIB),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options, interceptors=[MalformedRequestInterceptor()])
    names = [*add_services(server), health.SERVICE_NAME, reflection.SERVICE_NAME]
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(names, server)
    bound = listen_on_first((port,) if isinstance(port, int) else port, partial(_bind, server, host))
    await server.start()
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return Server(grpc_server=server, port=bound, health=health_servicer)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    if port and not is_port_free(host, port):  # gRPC would also log it, as an error
        raise OSError(errno.EADDRINUSE, f"cannot listen on {host}:{port}: the port is taken")
    try:
        bound: int = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    if bound == 0:
        raise OSError(errno.EADDRINUSE, f"cannot listen on {host}:{port}: the port is taken")
    return bound


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KvrelayError) -> NoReturn:
    """End a call with the status of `error`."""
    code, message, trailing = to_status(error)
    await context.abort(code, message, trailing)
    raise AssertionError("abort raises")


def is_cancelled() -> bool:
    """Whether the running task is being cancelled: if not, a CancelledError tells of what it awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


@asynccontextmanager
async def error_boundary(context: grpc.aio.ServicerContext[Any, Any], what: str) -> AsyncIterator[None]:
    """Turn exceptions of a handler into one terminal status. The only `except Exception` of a service."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the top of a handler
        await abort(context, to_report(error, what))


def to_report(error: Exception | asyncio.CancelledError, what: str) -> KvrelayError:
    """Return what to tell a caller of an exception that ended `what`; logs one that is not ours.

    Raises the CancelledError with which the running task is being cancelled.
    """
    if isinstance(error, KvrelayError):
        return error
    if not isinstance(error, asyncio.CancelledError):
        logger.error("%s failed", what, exc_info=error)
        return EngineFault(f"{what} failed: {type(error).__name__}: {error}")
    if is_cancelled():
        raise error
    # Something that was awaited was cancelled, such as a call on a channel that was closed. Unreported it would end
    # the task without a status, and the caller would wait for ever.
    logger.error("%s failed", what, exc_info=error)
    return EngineFault(f"{what} failed: what it waited for was cancelled")


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

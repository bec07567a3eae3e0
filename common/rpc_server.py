"""Guarded gRPC servers with health checking."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.acceptors import Acceptors
from common.ports import address_of, is_port_free, listen_on_first
from common.process import claim_open_files, connections_per_listener
from common.rpc import MIN_PING_INTERVAL_MS, MalformedRequestInterceptor, keepalive
from common.trust.access import Audience
from common.trust.guard import Guard

MAX_MESSAGE_BYTES = 64 << 20
"""Size limit of messages inside a cluster."""
MAX_UNTAKEN_CALLS = 16_384
"""Calls of one server that may wait for its event loop; gRPC drops those beyond, with a bare CANCELLED."""


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
    guard: Guard,
    receiver: grpc.aio.ServerInterceptor | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Server:
    """Start a guarded server with health checking on the first free port; 0 is always free.

    `add_services` registers the servicers and returns their full names; doors for clients also list them by reflection.
    `receiver` receives and decodes requests; without one gRPC does.
    Raises OSError when all ports are taken, or when the guard forbids the address.
    """
    options = [
        *keepalive(),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # Silent clients are disconnected; when all places are taken, new ones are.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 300_000),
        ("grpc.max_concurrent_streams", 4096),
        # Python takes few calls in a turn of the event loop, so they wait while it is busy. By default gRPC drops those
        # that have waited for 30 s, and some of more than 1,000. They have deadlines, and admission a limit.
        ("grpc.server_max_unrequested_time_in_server", 3600),
        ("grpc.server.max_pending_requests", MAX_UNTAKEN_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_UNTAKEN_CALLS),
        ("grpc.max_allowed_incoming_connections", connections_per_listener(claim_open_files())),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
    ]
    if receiver is not None:
        # Otherwise the window of every call grows with the speed of its connection, and what waits to be received too.
        options.append(("grpc.http2.bdp_probe", 0))
    interceptors = [guard, receiver or MalformedRequestInterceptor()]
    server = grpc.aio.server(options=options, interceptors=interceptors)
    acceptors = Acceptors(server, interceptors)
    names = [*add_services(cast(grpc.aio.Server, acceptors)), health.SERVICE_NAME]
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, acceptors)
    if guard.audience is Audience.CLIENTS:
        names.append(reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    bound = listen_on_first((port,) if isinstance(port, int) else port, partial(_bind, server, guard, host))
    await server.start()
    acceptors.start()
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return Server(grpc_server=server, port=bound, health=health_servicer)


def _bind(server: grpc.aio.Server, guard: Guard, host: str, port: int) -> int:
    address = address_of(host, port)
    if port and not is_port_free(host, port):  # checked first: gRPC would also log an error
        raise OSError(errno.EADDRINUSE, f"cannot listen on {address}: the port is taken")
    try:
        bound = guard.listen(server, host, port)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    if bound == 0:
        raise OSError(errno.EADDRINUSE, f"cannot listen on {address}: the port is taken")
    return bound

"""Takes the calls of a gRPC server several at once.

gRPC's own loop takes one call of a method at a time and needs five turns of the event loop for it. Calls wait in their
order of arrival meanwhile, so a tenant with many open calls delayed all others before anything knew whose calls they
are. Acceptors request calls beside that loop, in two turns each, and hand them to the same handlers. This needs parts
of gRPC that are not public; with a gRPC that has other ones its own loop does all.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

NUM_ACCEPTORS = 8
"""Calls of one method that are requested at once. More of them lengthen the turns of other work."""
_HANDLE = ["method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded"]
_SCHEDULE = ["rpc_coro", "rpc_state", "loop", "method_name"]


class Acceptors:
    """The acceptors of one server. Event loop only."""

    def __init__(self, server: grpc.aio.Server, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._server = server
        self._interceptors = tuple(interceptors)
        self._handlers: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Register handlers that gRPC's own loop serves."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register the handlers of a service, by method, for all loops; generated code calls this."""
        self._server.add_registered_method_handlers(service, dict(handlers))
        self._handlers |= {f"/{service}/{method}": handler for method, handler in handlers.items()}

    def start(self) -> None:
        """Take calls beside the started server, until it stops."""
        if not is_supported():
            return
        for method in self._handlers:
            for _ in range(NUM_ACCEPTORS):
                self._own(self._accept(method))

    def resolve_handler(self, call: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call; gRPC asks for it, behind the interceptors."""
        return self._handlers[call.method]

    async def _accept(self, method: str) -> None:
        server, loop = self._server._server, asyncio.get_running_loop()  # type: ignore[attr-defined]
        while server.is_running():
            try:
                call = await server._request_registered_call(method.encode())
            except cygrpc._RequestCallError:  # the server stops, or this one call has gone
                continue
            handling = cygrpc._handle_rpc(method, self, self._interceptors, call, loop, concurrency_exceeded=False)
            self._own(cygrpc._schedule_rpc_coro(handling, call, loop, method))

    def _own(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def is_supported() -> bool:
    """Return whether the installed gRPC has the parts that acceptors call."""
    if not hasattr(cygrpc.AioServer, "_request_registered_call") or not hasattr(cygrpc, "_RequestCallError"):
        return False
    return _parameters("_handle_rpc") == _HANDLE and _parameters("_schedule_rpc_coro") == _SCHEDULE


def _parameters(function: str) -> list[str]:
    return list(inspect.signature(getattr(cygrpc, function, is_supported)).parameters)

"""The one place that puts together what is fuzzed: a router and workers as they are, in virtual time, in this process.

They stand on the simulator's loop and network (`measure/simulate/`) and on the fake engine, whose pages and bytes are
real. Calls pass the interceptors of a real server, and raw bytes its deserializers.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
from uvicorn.server import ServerState

from cluster.worker_process.server import pool_services
from common.clock import Clock
from common.config import PoolConfig, PoolsConfig, RouterConfig, ServingConfig, TransferConfig
from common.rpc import MalformedRequestInterceptor
from common.timing import StepModel, TimingModel
from common.trust.access import Audience
from common.trust.credentials import Credentials
from common.trust.guard import Guard
from common.trust.identity import Role
from engine.core import EngineCore
from engine.executor import Executor
from engine.fake import FakeExecutor
from engine.thread import EngineDriver, EngineSetup
from kv_transfer.serve import check_by
from kvrelay.v1 import (
    inference_pb2_grpc,
    router_admin_pb2_grpc,
    worker_pb2,
)
from measure.simulate.engine import SimEngine
from measure.simulate.loop import VirtualClock
from measure.simulate.network import SimNetwork, SimServer
from measure.simulate.records import NetworkShape
from measure.simulate.timing import FittedTimes, WorkerSpeed
from measure.simulate.tokens import TokenLog
from measure.simulate.wire import PageBytes
from measure.simulate.worker import SharedWorld, SimWorker
from router.diagnosis.status import StatusReporter
from router.doors.authentication import make_authenticator
from router.doors.front_door import FrontDoor
from router.doors.service import InferenceService, RouterAdminService
from router.fleet.facts import WorkerEndpoint
from router.http.app import HttpApp
from router.http.connections import Connections, Patience
from router.http.protocol import DoorProtocol
from router.http.server import uvicorn_config
from router.parts import RouterParts, build_router
from router.reading.codec import ByteCodec
from router.reading.validation import RequestReader
from router.tenants import Terms
from tests.fuzz.loop import MeteredLoop
from tests.fuzz.members import DENIED, as_member, credentials_of, make_guard, reach_of
from worker.environment import Environment
from worker.service import WorkerService
from worker.serving import Plane, common_services

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 192
ROUTER = "router-0:1"
LEASE_TTL_S = 4.0
_BLOCK_KEY = b"k" * 32
_MAX_CONNECTIONS = 64
_TIMES = FittedTimes(
    TimingModel(
        prefill=StepModel(constant_s=4e-3, per_prefill_token_s=2e-4),
        decode=StepModel(constant_s=4e-3, per_decode_s=1e-4),
        max_step_tokens=32,
    )
)


def serving_config() -> ServingConfig:
    """Return the configuration of everything."""
    pool = PoolConfig(
        block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_step_tokens=32, max_running=12, max_waiting=32, metrics=False
    )
    return ServingConfig(
        pools=PoolsConfig(prefill=pool, decode=pool),
        transfer=TransferConfig(transports=("shm", "grpc"), chunk_bytes=4096, lease_ttl_s=LEASE_TTL_S),
        # Without heartbeats: hours of virtual time would be full of them.
        router=RouterConfig(
            metrics_port=None, http_port=None, default_max_tokens=8, queue_timeout_s=10.0, silence_s=None
        ),
    )


class BytesServer(SimServer):
    """A server whose calls come as bytes, as on a real one, or as the messages of the other simulated processes."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard
        """Listener whose services are added next."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve these methods behind the interceptors."""
        guarded = {
            method: _intercepted(f"/{service}/{method}", handler, self.guard) for method, handler in handlers.items()
        }
        super().add_registered_method_handlers(service, guarded)


def _intercepted(method: str, handler: Any, guard: Guard) -> Any:
    malformed, members_only = MalformedRequestInterceptor(), _for_members(handler)

    async def innermost(_details: object) -> Any:
        return members_only

    async def inner(details: grpc.HandlerCallDetails) -> Any:
        return await malformed.intercept_service(innermost, details)

    def guarded(context: Any) -> Any:
        details = SimpleNamespace(method=method, invocation_metadata=context.invocation_metadata())
        return _result(guard.intercept_service(inner, cast("grpc.HandlerCallDetails", details)))

    def handle_stream(requests: AsyncIterator[Any], context: Any) -> Any:
        found = guarded(context)
        return found.stream_stream(_Parsed(requests, partial(_parsed, found.request_deserializer)), context)

    def handle(request: Any, context: Any) -> Any:
        found = guarded(context)
        if found.request_streaming:  # at a door it is read behind the guard
            return found.stream_stream(_once(request), context)
        behavior = found.unary_stream if found.response_streaming else found.unary_unary
        return behavior(_parsed(found.request_deserializer, request), context)

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(handle_stream)
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(handle)


def _parsed(parse: Callable[[bytes], Any] | None, message: Any) -> Any:
    if parse is None or not isinstance(message, bytes):
        return message
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MeteredLoop)
    with loop.elsewhere():  # parsing is protobuf's own; `max_message_mib` bounds it
        return parse(message)


def _for_members(handler: Any) -> Any:
    """Return a handler that fails when it runs for a caller that must be refused before."""

    def behind(behavior: Callable[[Any, Any], Any]) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            assert DENIED not in context.invocation_metadata(), "a handler runs for a caller that may not call it"
            return await behavior(request, context)

        return handle

    if handler.request_streaming:
        make, behavior = grpc.stream_stream_rpc_method_handler, handler.stream_stream
    elif handler.response_streaming:
        make, behavior = grpc.unary_stream_rpc_method_handler, handler.unary_stream
    else:
        make, behavior = grpc.unary_unary_rpc_method_handler, handler.unary_unary
    return make(behind(behavior), handler.request_deserializer, handler.response_serializer)


async def _once(request: Any) -> AsyncIterator[Any]:
    """Yield the request of a call that has one."""
    yield request


class _Parsed:
    """Requests of a stream, deserialized when they are read, as grpc.aio does."""

    def __init__(self, requests: AsyncIterator[Any], parse: Callable[[Any], Any]) -> None:
        self._requests = requests
        self._parse = parse

    def __aiter__(self) -> "AsyncIterator[Any]":
        return self

    async def __anext__(self) -> Any:
        return self._parse(await anext(self._requests))


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the interceptor waits for something")


class FuzzWorker(SimWorker):
    """A simulated worker with every service of a real one, whose engine counts as another thread."""

    def start(self) -> None:
        """Serve."""
        runtime = self.runtime
        guards = {plane: make_guard(self._credentials, plane.value[0]) for plane in Plane}
        server = BytesServer(guards[Plane.CONTROL])
        for service in (
            *common_services(runtime, update_gap_s=self._surroundings.report_interval_s),
            *pool_services(runtime),
        ):
            server.guard = guards[service.plane]
            service.add(cast("grpc.aio.Server", server))
        runtime.start()
        self._surroundings.network.listen(self.endpoint.address, server)

    def describe(self) -> worker_pb2.DescribeWorkerResponse:
        """Return what it says of itself."""
        return WorkerService(self.runtime)._describe()  # noqa: SLF001 - what DescribeWorker answers

    @property
    def _credentials(self) -> Credentials:
        return credentials_of(Role.WORKER, self.endpoint.worker_id)

    def _outside(self) -> Environment:
        credentials, connect = self._credentials, self._surroundings.network.connect_from(self.endpoint.address)
        return dataclasses.replace(
            super()._outside(),
            connect=as_member(credentials, Role.WORKER, connect),
            check_pull=check_by(credentials),
        )

    def _drive(self, executor: Executor, setup: EngineSetup) -> EngineDriver:
        around = self._surroundings
        core = EngineCore(executor, setup.limits, setup.clock)
        assert isinstance(around.loop, MeteredLoop)
        for name in ("begin_step", "finish_step", "wake"):
            setattr(core, name, _on_engine_thread(around.loop, getattr(core, name)))
        return _MeteredEngine(core, setup.on_report, loop=around.loop, times=self._times, log=around.log)


class _MeteredEngine(SimEngine):
    def _run_commands(self) -> None:
        assert isinstance(self._loop, MeteredLoop)
        with self._loop.elsewhere():
            super()._run_commands()


def _on_engine_thread(loop: MeteredLoop, work: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with loop.elsewhere():
            return work(*args)

    return run


def make_network(loop: MeteredLoop) -> SimNetwork:
    """Return the network of everything."""
    return SimNetwork(loop, NetworkShape(kv_bytes_per_s=1e9), pages=PageBytes(block=0))


def make_worker(
    endpoint: WorkerEndpoint, loop: MeteredLoop, network: SimNetwork, *, steps_in_flight: int
) -> FuzzWorker:
    """Return a worker that is not started."""
    surroundings = SharedWorld(
        loop=loop, network=network, config=serving_config(), log=TokenLog(), report_interval_s=0.02
    )
    executor = FakeExecutor(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_steps_in_flight=steps_in_flight,
    )
    return FuzzWorker(endpoint, surroundings, executor, WorkerSpeed(times=_TIMES))


def make_router(loop: MeteredLoop, network: SimNetwork) -> FrontDoor:
    """Return a router's door; `serve_router_at` lets calls in."""
    config = serving_config()
    clock: Clock = VirtualClock(loop)
    parts: RouterParts = build_router(
        config.router,
        clock=clock,
        reach=reach_of(_router_credentials(), network.connect_from(ROUTER)),
        probes=ByteCodec.probes,
    )
    return FrontDoor(
        parts,
        RequestReader(ByteCodec(), default_max_tokens=config.router.default_max_tokens),
        authenticator=make_authenticator(config),
        default_terms=Terms(),
        block_key=_BLOCK_KEY,
    )


def _router_credentials() -> Credentials:
    return credentials_of(Role.ROUTER, "router-0")


def serve_router_at(door: FrontDoor, network: SimNetwork) -> None:
    """Let a router be called at `ROUTER`."""
    server = BytesServer(make_guard(_router_credentials(), Audience.CLIENTS, screen=door.screen))
    grpc_server = cast("grpc.aio.Server", server)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(door), grpc_server)
    server.guard = make_guard(_router_credentials(), Audience.INSIDERS)
    router_admin_pb2_grpc.add_RouterAdminServiceServicer_to_server(RouterAdminService(door), grpc_server)
    network.listen(ROUTER, server)


def make_http(door: FrontDoor) -> tuple[Callable[[], DoorProtocol], Connections]:
    """Return what makes the HTTP side of a connection to a router's door, as `router.http` does, and all of these."""
    connections, patience = Connections(most=_MAX_CONNECTIONS), Patience()
    config = uvicorn_config(HttpApp(door, StatusReporter(door.parts), connections), patience)
    config.load()
    state = ServerState()

    def connect() -> DoorProtocol:
        protocol = DoorProtocol(config, state, connections=connections, patience=patience)
        connections.add(protocol)
        return protocol

    return connect, connections

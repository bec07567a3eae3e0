"""Starts a router with its doors, and stops it."""

import asyncio
import logging
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry

from common.clock import SystemClock
from common.config import ServingConfig
from common.metrics_server import MetricsServer
from common.otlp import make_tracer
from common.ports import address_of
from common.rpc_server import Server, start_server
from common.slo import Slo
from common.structured import keep_going
from common.tracing import Tracer
from common.trust.access import Audience
from common.trust.channels import Reach
from common.trust.credentials import Credentials
from common.trust.doors import DoorCertificates, door_of, scrape_tls
from common.trust.guard import Guard
from common.watchdog import Watchdog
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, router_admin_pb2, router_admin_pb2_grpc
from router.diagnosis.status import StatusReporter
from router.doors.arrivals import Arrivals
from router.doors.authentication import make_authenticator, make_block_key
from router.doors.front_door import FrontDoor
from router.doors.service import InferenceService, RouterAdminService
from router.fleet.fleet import Fleet
from router.observe.traffic import TrafficRecordings
from router.parts import build_router
from router.reading.codec import ByteCodec, Codec
from router.reading.conversation import ChatFormats
from router.reading.validation import RequestReader
from router.record.outbox import MergeWindow
from router.tenants import Terms

if TYPE_CHECKING:
    from router.http.server import HttpServer

logger = logging.getLogger(__name__)

_SWITCH_S = 0.001
_LEAVE_S = 1.0
"""Longer than the pause before a client of several routers asks the next one."""


@dataclass(slots=True, kw_only=True)
class RunningRouter:
    """A serving router."""

    address: str
    """host:port of the gRPC door."""
    admin_address: str
    """host:port where the controller calls it."""
    fleet: Fleet
    recordings: TrafficRecordings
    server: Server
    admin_server: Server
    http: "HttpServer | None"
    registry: CollectorRegistry
    """Its metrics, served or not."""
    metrics_server: MetricsServer | None
    watchdog: Watchdog
    """Ends the process when its event loop hangs, once started."""
    tracer: Tracer
    watches: "tuple[asyncio.Task[None], ...]"
    """Background tasks that watch the event loop's lag and load, alarms, silence and the history."""
    door: FrontDoor
    leave_s: float
    """How long clients are sent to other routers before this one stops listening; 0: there are none."""

    @property
    def role(self) -> str:
        """Empty: a router belongs to no pool."""
        return ""

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus metrics; 0 when off."""
        return 0 if self.metrics_server is None else self.metrics_server.port

    @property
    def http_port(self) -> int:
        """Port of the HTTP door; 0 when off."""
        return 0 if self.http is None else self.http.port

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let running requests end for `grace_s` seconds, cancel the rest, leave the workers.

        With other routers present, this one first refuses new requests for a moment: a stopping gRPC server cancels
        requests that arrive, and their clients cannot know whether to repeat them.
        """
        self.recordings.finish()
        if self.leave_s:
            self.door.close()
            await asyncio.sleep(self.leave_s)
        doors = (self.server,) if self.http is None else (self.server, self.http)
        await asyncio.gather(*(door.stop(grace_s) for door in doors))
        await self.admin_server.stop(0)
        await self.fleet.aclose()
        for watch in self.watches:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
        if self.metrics_server is not None:
            await asyncio.to_thread(self.metrics_server.close)
        await asyncio.to_thread(self.tracer.close)
        await asyncio.to_thread(self.door.end)


async def start_router(
    config: ServingConfig, credentials: Credentials, *, model_dir: Path | None, host: str, port: int
) -> RunningRouter:
    """Start a router; port 0 picks a free one. `model_dir` holds the tokenizer; only the fake engine needs none.

    Raises OSError when a port is taken, ValueError when a real model has no folder, ConfigError for unusable API keys.
    """
    if model_dir is None and config.model.engine != "fake":
        raise ValueError("cannot load the tokenizer: a real model needs its folder")
    # Requests are read on threads that run Python: the event loop waits for the interpreter lock no longer than this.
    sys.setswitchinterval(_SWITCH_S)
    codec = await _load_codec(model_dir, config)
    router = await serve_router(config, credentials, codec=codec, host=host, port=port)
    router.door.readers.start()
    return router


async def serve_router(
    serving: ServingConfig,
    credentials: Credentials,
    *,
    codec: Codec,
    host: str,
    port: int,
) -> RunningRouter:
    """Start a router with a given codec. Raises OSError when a port is taken, ConfigError for bad keys."""
    config = serving.router
    clock = SystemClock()
    slo = Slo(ttft_s=serving.slo.ttft_s, ttft_tokens=serving.slo.ttft_tokens, tpot_s=serving.slo.tpot_s)
    parts = build_router(
        config,
        clock=clock,
        reach=Reach.of(credentials, has_own_files=serving.tls.certificate is not None),
        seed=secrets.randbits(64),
        probes=codec.probes,
    )
    # Whatever the method is now: it may change while this router runs, the rule only with the generation.
    parts.orchestrator.has_coupled_drafts = serving.model.speculation.rule == "coupled"
    parts.orchestrator.demand.judge_by(slo)
    parts.fleet.aliases, parts.fleet.configured_id = serving.model.aliases, serving.model.id
    tracer = make_tracer(serving.tracing, service="kvrelay-router", instance=credentials.identity.name)
    parts.orchestrator.traces.record_to(tracer, serving.tracing)
    metrics, fleet = parts.metrics, parts.fleet
    merging = MergeWindow()
    door = FrontDoor(
        parts,
        RequestReader(
            codec,
            default_max_tokens=config.default_max_tokens,
            model_defaults=codec.sampling_defaults if serving.model.generation_config else {},
            formats=ChatFormats.of(serving.model, codec),
        ),
        authenticator=make_authenticator(serving, credentials),
        default_terms=Terms(
            ttft_slo_s=serving.slo.ttft_s, ttft_tokens=serving.slo.ttft_tokens, tpot_slo_s=serving.slo.tpot_s
        ),
        merging=merging,
        block_key=make_block_key(serving, bytes.fromhex(credentials.held.enrolment.block_key)),
    )
    async with AsyncExitStack() as undoing:
        metrics_server = http = None
        watchdog = Watchdog.of_this_process()
        if config.metrics_port is not None:
            metrics_server = MetricsServer(
                metrics.registry, host=host, port=config.metrics_port, tls=scrape_tls(credentials), watchdog=watchdog
            )
            undoing.callback(metrics_server.close)
        certificates = door_of(serving.tls, credentials)
        reporter = StatusReporter(parts, is_encrypted=credentials.is_encrypted)
        if config.http_port is not None:
            names = serving.tls.names
            http = await _start_http(door, reporter, certificates, host=host, port=config.http_port, names=names)
            reporter.http_port = http.port
            undoing.push_async_callback(http.stop, 0)
        admin_server = await start_server(
            partial(_add_admin, door), host=host, port=config.admin_port, guard=Guard(credentials, Audience.INSIDERS)
        )
        undoing.push_async_callback(admin_server.stop, 0)
        server = await start_server(
            partial(_add_inference, InferenceService(door, reporter)),
            host=host,
            port=port,
            guard=Guard(credentials, Audience.CLIENTS, door=certificates, screen=door.screen),
            receiver=Arrivals(door),
            max_message_bytes=config.max_message_mib << 20,
        )
        undoing.pop_all()
    router = RunningRouter(
        address=address_of(host, server.port),
        admin_address=address_of(host, admin_server.port),
        fleet=fleet,
        recordings=parts.orchestrator.recordings,
        server=server,
        admin_server=admin_server,
        http=http,
        registry=metrics.registry,
        metrics_server=metrics_server,
        watchdog=watchdog,
        tracer=tracer,
        door=door,
        leave_s=_LEAVE_S if config.count > 1 else 0.0,
        watches=tuple(
            asyncio.create_task(keep_going(name, watch), name=name)
            for name, watch in (
                ("event-loop lag", partial(metrics.watch_event_loop, clock)),
                ("event-loop load", merging.watch),
                ("alarms", parts.alarms.watch),
                ("history", parts.history.watch),
                ("silence", parts.silence.watch if parts.silence is not None else None),
            )
            if watch is not None
        ),
    )
    logger.info("serving", extra={"port": server.port, "http_port": router.http_port, "policy": config.policy})
    return router


def _add_inference(service: InferenceService, server: grpc.aio.Server) -> list[str]:
    """Add the clients' service to a server and return its name."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    return [inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name]


def _add_admin(door: FrontDoor, server: grpc.aio.Server) -> list[str]:
    """Add the controller's service to a server and return its name."""
    router_admin_pb2_grpc.add_RouterAdminServiceServicer_to_server(RouterAdminService(door), server)
    return [router_admin_pb2.DESCRIPTOR.services_by_name["RouterAdminService"].full_name]


async def _start_http(
    door: FrontDoor,
    reporter: StatusReporter,
    certificates: DoorCertificates | None,
    *,
    host: str,
    port: int,
    names: Sequence[str],
) -> "HttpServer":
    from router.http.server import start_http_server  # its libraries are needed only for HTTP

    return await start_http_server(door, reporter, certificates, host=host, port=port, names=names)


async def _load_codec(model_dir: Path | None, config: ServingConfig) -> Codec:
    if model_dir is None:
        return ByteCodec()
    from router.reading.tokenizer import TextCodec  # the fake engine needs no tokenizer library

    template, cache_mib = config.model.chat_template, config.router.token_cache_mib
    return await asyncio.to_thread(TextCodec.load, model_dir, chat_template=template, cache_mib=cache_mib)

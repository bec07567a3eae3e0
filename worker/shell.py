"""The process around a worker: start, announce, serve, stop. With or without Ray."""

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from common.config import ConfigError, ServingConfig, load_config
from common.log import setup_logging
from common.metrics_server import MetricsServer
from common.process import Ready, die_with_parent, ready_line
from common.rpc import Server, start_server
from common.wire_names import ROLE_NAMES, ROLE_NUMBERS
from kvrelay.v1 import (
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefix_pb2,
    prefix_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from worker.departure import take_leave
from worker.metrics import serve_metrics
from worker.prefix_service import PrefixService
from worker.runtime import WorkerRuntime
from worker.service import WorkerService

logger = logging.getLogger(__name__)

AddServices = Callable[[grpc.aio.Server, WorkerRuntime], Sequence[str]]
"""Registers services of a worker beside those that all have, and returns their full names."""

_CALLS_GRACE_S = 5.0
"""For calls that still run when the worker has taken leave."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class RunningWorker:
    """A worker that serves."""

    runtime: WorkerRuntime
    server: Server
    metrics: MetricsServer | None
    address: str

    @property
    def role(self) -> str:
        """Name of its role at this moment."""
        return ROLE_NAMES[self.runtime.role]

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus metrics; 0 when off."""
        return self.metrics.port if self.metrics is not None else 0

    async def stop(self, grace_s: float) -> None:
        """Take leave, refuse new work, let running calls end, all within `grace_s` seconds; free everything.

        With 0 it ends at once, and nobody is told.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + grace_s
        if grace_s > 0:
            await take_leave(self.runtime, grace_s=grace_s)
        self.runtime.hub.close()
        for drain in self.runtime.on_drain:
            drain()
        await self.server.stop(min(_CALLS_GRACE_S, max(0.0, end_s - loop.time())))
        await self.runtime.aclose()
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.close)


async def start_worker(runtime: WorkerRuntime, add_services: AddServices, *, host: str, port: int) -> RunningWorker:
    """Start a runtime and serve it; port 0 takes one of its pool's. Raises OSError when none is free."""
    worker_service, prefix_service = WorkerService(runtime), PrefixService(runtime)

    def add(server: grpc.aio.Server) -> list[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker_service, server)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(runtime.transfer_service(), server)
        prefix_pb2_grpc.add_PrefixServiceServicer_to_server(prefix_service, server)
        return [
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
            kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name,
            prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"].full_name,
            *add_services(server, runtime),
        ]

    metrics = serve_metrics(runtime, host) if runtime.pool_config.metrics else None
    runtime.start()
    try:
        server = await start_server(add, host=host, port=port or runtime.pool_config.port_range)
    except BaseException:
        await runtime.aclose()
        if metrics is not None:
            await asyncio.to_thread(metrics.close)
        raise
    worker_service.metrics_port = metrics.port if metrics is not None else 0
    logger.info(
        "serving",
        extra={
            "worker_id": runtime.worker_id,
            "role": ROLE_NAMES[runtime.role],
            "port": server.port,
            "epoch": runtime.epoch,
            "num_blocks": runtime.executor.kv.num_blocks,
        },
    )
    return RunningWorker(runtime=runtime, server=server, metrics=metrics, address=f"{host}:{server.port}")


def worker_main(add_services: AddServices) -> None:
    """Run a worker as a plain process: one ready line on stdout, logs on stderr, SIGTERM drains it."""
    parser = argparse.ArgumentParser(prog="python -m pool_worker", description="A kvrelay worker.")
    parser.add_argument("--config", type=Path, required=True, help="serving.yaml")
    parser.add_argument("--role", choices=list(ROLE_NUMBERS), required=True, help="the pool in which it begins")
    parser.add_argument("--worker-id", help="name, stable over restarts and changes of role (default ROLE-0)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one of its pool's `ports`")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="never outlive the process that started this one"
    )
    args = parser.parse_args()
    if args.die_with_parent:
        die_with_parent()
    args.worker_id = args.worker_id or f"{args.role}-0"
    setup_logging(args.worker_id)
    try:
        config = load_config(args.config).for_worker()
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    try:
        import uvloop
    except ImportError:
        run = asyncio.run
    else:
        run = uvloop.run
    run(_serve(config, add_services, args))


async def _serve(config: ServingConfig, add_services: AddServices, args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    _on_first_signal(stop.set)
    runtime = await WorkerRuntime.load_from(config, role=ROLE_NUMBERS[args.role], worker_id=args.worker_id)
    worker = await start_worker(runtime, add_services, host=args.host, port=args.port)
    ready = Ready(address=worker.address, metrics_port=worker.metrics_port, pid=os.getpid(), role=worker.role)
    print(ready_line(ready), flush=True)  # noqa: T201 - the one line that the launcher reads
    await stop.wait()
    await worker.stop(runtime.pool_config.drain_grace_s)


def _on_first_signal(told: Callable[[], None]) -> None:
    """Call `told` with the first signal to end; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        for signum in _SIGNALS:
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_DFL)
        told()

    for signum in _SIGNALS:
        loop.add_signal_handler(signum, first)

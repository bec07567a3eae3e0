"""The process around a worker: enrol, start, announce, serve, stop. Without Ray."""

import argparse
import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from common.config import ConfigError, ServingConfig, load_config
from common.log import setup_logging
from common.process import Ready, die_with_parent, ready_line
from common.trust.credentials import Credentials
from common.trust.pipe import EnrolmentPipe, NotEnrolled
from common.wire_names import ROLE_NUMBERS
from kvrelay.v1 import worker_pb2
from worker.serving import RunningWorker

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StartWorker(Protocol):
    """Loads the model and serves."""

    async def __call__(
        self,
        config: ServingConfig,
        credentials: Credentials,
        *,
        role: worker_pb2.WorkerRole.ValueType,
        host: str,
        port: int,
    ) -> RunningWorker:
        """Return the worker once it serves. Raises OSError."""
        ...


def worker_main(start: StartWorker) -> None:
    """Run a worker as a plain process: its certificate on stdin, one ready line on stdout, SIGTERM drains it."""
    parser = argparse.ArgumentParser(prog="python -m cluster.worker_process", description="A kvrelay worker.")
    parser.add_argument("--config", type=Path, required=True, help="serving.yaml")
    parser.add_argument("--role", choices=list(ROLE_NUMBERS), required=True, help="the pool in which it begins")
    parser.add_argument("--worker-id", help="name in its logs until it is enrolled (default ROLE-0)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="of its control; 0 picks a free one of its pool's `ports`")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="never outlive the process that started this one"
    )
    args = parser.parse_args()
    if args.die_with_parent:
        die_with_parent()
    setup_logging(args.worker_id or f"{args.role}-0")
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
    try:
        run(_serve(config, start, args))
    except NotEnrolled as error:
        parser.exit(2, f"{error}\n")


async def _serve(config: ServingConfig, start: StartWorker, args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    _on_first_signal(stop.set)
    credentials = Credentials()
    pipe = EnrolmentPipe(credentials)
    await pipe.open()
    renewing = asyncio.create_task(pipe.keep_renewed(), name="renew certificate")
    worker = await start(config, credentials, role=ROLE_NUMBERS[args.role], host=args.host, port=args.port)
    ready = Ready(
        address=worker.address,
        admin_address=worker.admin_address,
        metrics_port=worker.metrics_port,
        pid=os.getpid(),
        role=worker.role,
    )
    print(ready_line(ready), flush=True)  # noqa: T201 - the one line that the launcher reads
    await stop.wait()
    await worker.stop(worker.runtime.pool_config.drain_grace_s)
    renewing.cancel()
    with suppress(asyncio.CancelledError):
        await renewing


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

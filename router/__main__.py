"""`python -m router`: the router as a plain process.

Its certificate comes on stdin (common/trust/pipe.py); one ready line on stdout, logs on stderr, SIGTERM drains it.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from common.config import ConfigError, ServingConfig, load_config
from common.log import setup_logging
from common.model_files import ModelNotFound, resolve_model
from common.ports import names_of
from common.process import Ready, die_with_parent, ready_line
from common.trust.credentials import Credentials
from common.trust.pipe import EnrolmentPipe, NotEnrolled
from router.server import start_router

STOP_GRACE_S = 10.0


def main() -> None:
    """Parse the command line and serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m router", description="The kvrelay router.")
    parser.add_argument("--config", type=Path, required=True, help="serving.yaml")
    parser.add_argument("--host", help="address to listen on; default: serving.yaml's")
    parser.add_argument("--port", type=int, help="0 picks a free one; default: serving.yaml's")
    parser.add_argument("--index", type=int, default=0, help="number of this router; added to the ports of the file")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="never outlive the process that started this one"
    )
    args = parser.parse_args()
    if args.die_with_parent:
        die_with_parent()
    setup_logging(f"router-{args.index}")
    try:
        config = load_config(args.config).for_router(args.index)
        model_dir = _model_dir(config)
    except (ConfigError, ModelNotFound) as error:
        parser.exit(2, f"{error}\n")
    host = config.router.host if args.host is None else args.host
    port = config.router.port if args.port is None else args.port
    try:
        import uvloop
    except ImportError:
        run = asyncio.run
    else:
        run = uvloop.run
    try:
        run(_serve(config, model_dir, host, port))
    except ConfigError as error:
        parser.exit(2, f"{args.config}:{error}\n")
    except NotEnrolled as error:
        parser.exit(2, f"{error}\n")


def _model_dir(config: ServingConfig) -> Path | None:
    if config.model.engine == "fake":
        return None
    return resolve_model(config.model.id, local_files_only=config.model.local_files_only)


async def _serve(config: ServingConfig, model_dir: Path | None, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    credentials = Credentials()
    pipe = EnrolmentPipe(credentials, lambda: [*names_of(host), *config.tls.names])
    await pipe.open()
    renewing = asyncio.create_task(pipe.keep_renewed(), name="renew certificate")
    # What was loaded stays, and need not be looked at again; what requests leave behind may wait a little.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    router = await start_router(config, credentials, model_dir=model_dir, host=host, port=port)
    ready = Ready(
        address=router.address,
        admin_address=router.admin_address,
        metrics_port=router.metrics_port,
        pid=os.getpid(),
    )
    sys.stdout.write(ready_line(ready) + "\n")
    sys.stdout.flush()
    await stop.wait()
    await router.stop(STOP_GRACE_S)
    renewing.cancel()
    with suppress(asyncio.CancelledError):
        await renewing


if __name__ == "__main__":
    main()

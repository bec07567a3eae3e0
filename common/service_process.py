"""The shell in which a service runs as a plain process.

Its certificate comes on stdin (common/trust/pipe.py); one ready line, or the reason why there is none, goes to stdout,
logs go to stderr. The first SIGTERM or SIGINT drains it, a second one ends it at once.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from common.event_loop import run
from common.process import (
    CannotStart,
    RunningService,
    die_with_parent,
    failure_line,
    ready_line,
    ready_of,
    spare_loaded_objects,
)
from common.signals import on_first_signal
from common.trust.credentials import Credentials
from common.trust.pipe import EnrolmentPipe

_EXIT_CANNOT_START = 2
_Service = TypeVar("_Service", bound=RunningService)


def service_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every service has, but for its address."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--config", type=Path, required=True, help="serving.yaml")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="never outlive the process that started this one"
    )
    return parser


def parse_service_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the parsed command line, once this process dies with its parent where that is asked for."""
    args = parser.parse_args()
    if args.die_with_parent:
        die_with_parent()
    return args


@contextmanager
def reported_failures() -> Iterator[None]:
    """End the process when the block finds that it cannot start; the launcher and the log are told the reason."""
    try:
        yield
    except CannotStart as failure:
        sys.stdout.write(failure_line(failure) + "\n")
        sys.stdout.flush()
        sys.stderr.write(f"{failure.key}: {failure}\n" if failure.key else f"{failure}\n")
        sys.exit(_EXIT_CANNOT_START)


def run_service(
    start: Callable[[Credentials], Awaitable[_Service]],
    *,
    grace_s: Callable[[_Service], float],
    hosts: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Enrol, start a service, serve until a signal comes, and stop it within its grace.

    `hosts`: addresses and names for the certificate of a router. Raises NotEnrolled, and what `start` raises.
    """
    run(_serve(start, grace_s, hosts))


async def _serve(
    start: Callable[[Credentials], Awaitable[_Service]],
    grace_s: Callable[[_Service], float],
    hosts: Callable[[], Sequence[str]],
) -> None:
    stop = asyncio.Event()
    on_first_signal(stop.set)
    credentials = Credentials()
    pipe = EnrolmentPipe(credentials, hosts)
    await pipe.open()
    renewing = asyncio.create_task(pipe.keep_renewed(), name="renew certificate")
    service = await start(credentials)
    spare_loaded_objects()
    service.watchdog.start()
    sys.stdout.write(ready_line(ready_of(service)) + "\n")
    sys.stdout.flush()
    await stop.wait()
    await service.stop(grace_s(service))
    renewing.cancel()
    with suppress(asyncio.CancelledError):
        await renewing

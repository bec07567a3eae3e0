"""Detects the death of a process that is not our child, and a process that lives but no longer answers."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.process import ProcessIdentity
from common.rpc import Connect

_PERIOD_S = 0.5
_PROBE_TIMEOUT_S = 1.25
_REFUSED_LIMIT = 2
_SILENT_LIMIT = 4
_DEATH_TIMEOUT_S = 5.0
_POLL_S = 0.1


async def process_gone(identity: ProcessIdentity) -> None:
    """Return when a process of this host is dead: within a millisecond if the kernel supports pidfd."""
    if not hasattr(os, "pidfd_open"):
        while identity.is_alive():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(_POLL_S)
        return
    try:
        fd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if identity.is_alive():  # else the fd may belong to a successor with the same pid
            await until_exited(fd)
    finally:
        os.close(fd)


async def until_exited(pidfd: int) -> None:
    """Return when the process of a pidfd has exited."""
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)


async def forever() -> str:
    """Wait until cancelled."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def until_over(died: Coroutine[Any, Any, str], silent: Coroutine[Any, Any, str], kill: Callable[[], None]) -> str:
    """Return why a process is over: it `died`, or it was `silent` and was killed for that.

    A process that the kernel cannot end in time counts as over.
    """
    dying, listening = asyncio.ensure_future(died), asyncio.ensure_future(silent)
    try:
        await asyncio.wait((dying, listening), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            return dying.result()
        reason = listening.result()
        kill()
        await asyncio.wait((dying,), timeout=_DEATH_TIMEOUT_S)
        return f"{reason}; killed"
    finally:
        for task in (dying, listening):
            task.cancel()
        await asyncio.wait((dying, listening))


async def service_gone(address: str, connect: Connect, *, is_here: bool = False) -> str:
    """Return the reason when a service is lost: two refused or four unanswered checks in a row, about 7 s.

    A busy service answers late, so a few unanswered checks do not count. On this host (`is_here`), where its death
    shows otherwise, a refused check counts as an unanswered one, and takes as long.
    """
    num_refused = num_silent = 0
    async with connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            begun_s = asyncio.get_running_loop().time()
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
                num_refused = num_silent = 0
            except grpc.aio.AioRpcError as error:
                match error.code():
                    case grpc.StatusCode.DEADLINE_EXCEEDED:
                        num_silent += 1
                    case grpc.StatusCode.UNAVAILABLE if is_here:
                        num_silent += 1
                        # It may be ending in order, which takes seconds.
                        await asyncio.sleep(begun_s + _PROBE_TIMEOUT_S - asyncio.get_running_loop().time())
                    case grpc.StatusCode.UNAVAILABLE:
                        num_refused += 1
                    case _:  # it lives, though something is wrong
                        num_refused = num_silent = 0
            if num_refused >= _REFUSED_LIMIT:
                return f"{address} refused {num_refused} health checks"
            if num_silent >= _SILENT_LIMIT:
                return f"{address} left {num_silent} health checks unanswered"
            await asyncio.sleep(_PERIOD_S)

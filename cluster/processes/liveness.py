"""Detects the death of a process that is not our child, and a process that lives but no longer answers."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.process import ProcessIdentity
from common.rpc import PINGED_S, Connect

_PERIOD_S = 0.5
_ANSWER_S = 30.0
"""Time that a connected service has for a health check: several turns of its event loop, each as long as its watchdog
lets it be."""
_UNANSWERED_LIMIT = 2
"""The second one counts: the first may have run out while this process was stopped itself."""
_REFUSED_LIMIT = 2
_SILENT_S = 7.0
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
    """Return the reason when a service is lost. One that is only busy is not, however late it answers.

    Threads of gRPC answer pings whatever the event loop does, and the service's own watchdog notices when that loop
    hangs. So a service whose connection holds is alive, and has long for a health check: it fails one only if no thread
    of Python runs. One that is not connected is lost 7 s after its last sign of life, or with the second connection
    that it refuses. On this host (`is_here`), where its death shows otherwise, one that refuses may be ending in order,
    and has the 7 s for that.
    """
    loop = asyncio.get_running_loop()
    async with connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        num_refused = num_unanswered = 0
        heard_s = loop.time()
        while True:
            was_connected = _is_connected(channel)
            timeout_s = _ANSWER_S if was_connected else heard_s + _SILENT_S - loop.time()
            match await _check(stub, timeout_s=timeout_s):
                case grpc.StatusCode.UNAVAILABLE:
                    num_refused += 1
                    if was_connected:  # until now: it has answered a ping
                        heard_s = max(heard_s, loop.time() - PINGED_S)
                case grpc.StatusCode.DEADLINE_EXCEEDED if _is_connected(channel):
                    num_refused, num_unanswered = 0, num_unanswered + was_connected
                    heard_s = loop.time()
                case grpc.StatusCode.DEADLINE_EXCEEDED:
                    pass
                case _:  # it answers, even if with an error
                    num_refused = num_unanswered = 0
                    heard_s = loop.time()
            if num_refused >= _REFUSED_LIMIT and not is_here:
                return f"{address} refused {num_refused} health checks"
            if num_unanswered >= _UNANSWERED_LIMIT:
                return f"{address} left {num_unanswered} health checks unanswered, each for {_ANSWER_S:.0f} s"
            if loop.time() - heard_s >= _SILENT_S:
                return f"{address} has been silent for {_SILENT_S:.0f} s"
            await asyncio.sleep(_PERIOD_S)


def _is_connected(channel: grpc.aio.Channel) -> bool:
    """Return whether a service answers pings."""
    return channel.get_state() is grpc.ChannelConnectivity.READY


async def _check(stub: health_pb2_grpc.HealthStub, *, timeout_s: float) -> grpc.StatusCode:
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK

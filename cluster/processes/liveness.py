"""Detects the death of a process that is not our child."""

import asyncio
import os

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.process import ProcessIdentity
from common.rpc import Connect

_PERIOD_S = 0.5
_PROBE_TIMEOUT_S = 2.0
_REFUSED_LIMIT = 2
_SILENT_LIMIT = 10
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
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    try:
        if not identity.is_alive():  # the fd may belong to a successor with the same pid
            return
        loop.add_reader(fd, gone.set)
        await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def service_gone(address: str, connect: Connect) -> str:
    """Return the reason when a service on another host is lost: two refused or ten unanswered checks in a row.

    A busy service answers late, so a few unanswered checks do not count.
    """
    num_refused = num_silent = 0
    async with connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
                num_refused = num_silent = 0
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    num_refused += 1
                else:
                    num_silent += 1
            if num_refused >= _REFUSED_LIMIT:
                return f"{address} refused {num_refused} health checks"
            if num_silent >= _SILENT_LIMIT:
                return f"{address} left {num_silent} health checks unanswered"
            await asyncio.sleep(_PERIOD_S)

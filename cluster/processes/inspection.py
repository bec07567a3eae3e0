"""Asks a worker what it has done and how fast it is."""

from dataclasses import dataclass

import grpc

from common.rpc import Connect
from common.timing import TimingModel
from common.timing_wire import timing_from_proto
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A worker at one moment."""

    busy_s: float
    """In which its engine has run steps since it started."""
    num_decodes: int
    num_context_tokens: int
    """KV tokens of its running sequences."""
    timing: TimingModel


async def look_at(address: str, connect: Connect) -> Look | None:
    """Ask the worker at host:port; None when it does not answer, or not with anything that makes sense."""
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            told = await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=_TIMEOUT_S)
            timing = timing_from_proto(told.timing)
        except (grpc.aio.AioRpcError, ValueError):
            return None
    return Look(
        busy_s=told.status.busy_s,
        num_decodes=told.status.load.num_decoding,
        num_context_tokens=told.status.load.num_context_tokens,
        timing=timing,
    )

"""Calls from the controller to one worker: `GetWorkerStatus` and `SetRole`."""

from dataclasses import dataclass

import grpc

from cluster.processes.plan import ProcessRole
from common.errors import from_rpc_error
from common.rpc import Connect
from common.timing import TimingModel, timing_from_proto
from common.wire_names import ROLE_NUMBERS
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

_STATUS_TIMEOUT_S = 2.0
_ANSWER_S = 10.0
"""Time allowed for a call itself, beyond the worker's own wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker's status at one moment."""

    busy_s: float
    """Time that its engine has run steps since it started."""
    num_decodes: int
    num_context_tokens: int
    """KV tokens of its running sequences."""
    timing: TimingModel


async def inspect_worker(address: str, connect: Connect) -> WorkerSnapshot | None:
    """Return the status of the worker at host:port; None if it does not answer or its answer is invalid."""
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=_STATUS_TIMEOUT_S)
            timing = timing_from_proto(answer.timing)
        except (grpc.aio.AioRpcError, ValueError):
            return None
    return WorkerSnapshot(
        busy_s=answer.status.busy_s,
        num_decodes=answer.status.load.num_decoding,
        num_context_tokens=answer.status.load.num_context_tokens,
        timing=timing,
    )


async def set_role(address: str, role: ProcessRole, connect: Connect, *, grace_s: float) -> None:
    """Give the worker at host:port a role once it is empty. Harmless if it has that role already.

    Raises KvrelayError: Overloaded if it is not empty after `grace_s`, WorkerLost if it does not answer.
    """
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            described = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=_ANSWER_S)
            await stub.SetRole(
                worker_pb2.SetRoleRequest(role=ROLE_NUMBERS[role], epoch=described.epoch, grace_s=grace_s),
                timeout=grace_s + _ANSWER_S,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

"""Asks a worker to change its role (`WorkerService.SetRole`)."""

import grpc

from cluster.processes.plan import ProcessRole
from common.errors import from_rpc_error
from common.rpc import Connect
from common.wire_names import ROLE_NUMBERS
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

_ANSWER_S = 10.0
"""For the call itself, behind the worker's own wait."""


async def set_role(address: str, role: ProcessRole, connect: Connect, *, grace_s: float) -> None:
    """Have the worker at an address in a role, once it is empty. Harmless when it has the role.

    Raises KvrelayError: Overloaded when it is not empty after `grace_s`, WorkerLost when it does not answer.
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

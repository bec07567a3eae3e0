"""Starts a worker that can change its role: the services of both pools on one runtime.

Which of them is called is the routers' choice; the runtime's role says which they are to choose.
"""

import grpc

from common.config import ServingConfig
from decode_worker.server import add_services as add_decode_services
from kvrelay.v1 import worker_pb2
from prefill_worker.server import add_services as add_prefill_services
from worker.runtime import WorkerRuntime
from worker.shell import RunningWorker, start_worker


def add_services(server: grpc.aio.Server, runtime: WorkerRuntime) -> list[str]:
    """Register the services of both pools and return their full names."""
    return [*add_prefill_services(server, runtime), *add_decode_services(server, runtime)]


async def start_pool_worker(
    config: ServingConfig, *, role: worker_pb2.WorkerRole.ValueType, worker_id: str, host: str, port: int
) -> RunningWorker:
    """Load the model and serve. Raises OSError when the port is taken."""
    runtime = await WorkerRuntime.load_from(config, role=role, worker_id=worker_id)
    return await start_worker(runtime, add_services, host=host, port=port)

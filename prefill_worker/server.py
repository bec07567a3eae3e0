"""Starts a prefill worker."""

import grpc

from common.config import ServingConfig
from kvrelay.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from prefill_worker.service import PrefillService
from worker.runtime import WorkerRuntime
from worker.shell import RunningWorker, start_worker

ROLE = worker_pb2.WORKER_ROLE_PREFILL


def add_services(server: grpc.aio.Server, runtime: WorkerRuntime) -> list[str]:
    """Register the services of this kind of worker."""
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(runtime), server)
    return [prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name]


async def start_prefill_worker(config: ServingConfig, *, worker_id: str, host: str, port: int) -> RunningWorker:
    """Load the model and serve. Raises OSError when the port is taken."""
    runtime = await WorkerRuntime.load_from(config, role=ROLE, worker_id=worker_id)
    return await start_worker(runtime, add_services, host=host, port=port)

"""Starts a decode worker."""

import grpc

from common.config import ServingConfig
from decode_worker.direct import DirectTable
from decode_worker.service import DecodeService, DirectService
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from worker.runtime import WorkerRuntime
from worker.shell import RunningWorker, start_worker

ROLE = worker_pb2.WORKER_ROLE_DECODE


def add_services(server: grpc.aio.Server, runtime: WorkerRuntime) -> list[str]:
    """Register the services of this kind of worker."""
    directs = DirectTable()
    service = DecodeService(runtime, directs)
    runtime.on_drain.append(service.drain)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, server)
    decode_pb2_grpc.add_DirectServiceServicer_to_server(DirectService(directs), server)
    return [decode_pb2.DESCRIPTOR.services_by_name[name].full_name for name in ("DecodeService", "DirectService")]


async def start_decode_worker(config: ServingConfig, *, worker_id: str, host: str, port: int) -> RunningWorker:
    """Load the model and serve. Raises OSError when the port is taken."""
    runtime = await WorkerRuntime.load_from(config, role=ROLE, worker_id=worker_id)
    return await start_worker(runtime, add_services, host=host, port=port)

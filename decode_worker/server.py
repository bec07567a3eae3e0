"""Puts the decode side of a worker on a server."""

import grpc

from decode_worker.direct import DirectTable
from decode_worker.service import DecodeService, DirectService
from kvrelay.v1 import decode_pb2, decode_pb2_grpc
from worker.runtime import WorkerRuntime


def add_services(server: grpc.aio.Server, runtime: WorkerRuntime) -> list[str]:
    """Register the services of the decode pool and return their full names."""
    directs = DirectTable()
    service = DecodeService(runtime, directs)
    runtime.on_drain.append(service.drain)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, server)
    decode_pb2_grpc.add_DirectServiceServicer_to_server(DirectService(directs), server)
    return [decode_pb2.DESCRIPTOR.services_by_name[name].full_name for name in ("DecodeService", "DirectService")]

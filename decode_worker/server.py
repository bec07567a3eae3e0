"""The decode side of a worker, as services on its listeners."""

from decode_worker.direct import DirectTable
from decode_worker.service import DecodeService, DirectService
from kvrelay.v1 import decode_pb2, decode_pb2_grpc
from worker.runtime import WorkerRuntime
from worker.serving import Plane, PlaneService


def decode_services(runtime: WorkerRuntime) -> list[PlaneService]:
    """Return the services of the decode pool on a runtime."""
    directs = DirectTable()
    service = DecodeService(runtime, directs)
    runtime.on_drain.append(service.drain)
    add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    add_direct = decode_pb2_grpc.add_DirectServiceServicer_to_server
    return [
        PlaneService.of(Plane.CONTROL, decode_pb2, add, service),
        PlaneService.of(Plane.DIRECT, decode_pb2, add_direct, DirectService(directs)),
    ]

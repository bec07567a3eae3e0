"""The prefill side of a worker, as services on its listeners."""

from kvrelay.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_worker.service import PrefillService
from worker.runtime import WorkerRuntime
from worker.serving import Plane, PlaneService


def prefill_services(runtime: WorkerRuntime) -> list[PlaneService]:
    """Return the services of the prefill pool on a runtime."""
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    return [PlaneService.of(Plane.CONTROL, prefill_pb2, add, PrefillService(runtime))]

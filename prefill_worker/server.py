"""Puts the prefill side of a worker on a server."""

import grpc

from kvrelay.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_worker.service import PrefillService
from worker.runtime import WorkerRuntime


def add_services(server: grpc.aio.Server, runtime: WorkerRuntime) -> list[str]:
    """Register the services of the prefill pool and return their full names."""
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(runtime), server)
    return [prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name]

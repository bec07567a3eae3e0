"""DecodeService: all calls of a router on one stream (`shared_stream.py`, `call.py`).

DirectService: answers that clients stream themselves (`direct.py`).
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.rpc import error_boundary, send_headers
from common.structured import TaskTracker
from decode_worker.call import DecodeCall
from decode_worker.direct import DirectTable
from decode_worker.shared_stream import Outlet, SharedStream
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1 import decode_pb2_grpc
from worker.runtime import WorkerRuntime
from worker.serving import Plane, PlaneService

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Serves one runtime."""

    def __init__(self, runtime: WorkerRuntime, directs: DirectTable) -> None:
        self._runtime = runtime
        self._tracker = TaskTracker()
        self._directs = directs
        self._shared: set[SharedStream] = set()
        self._is_draining = False

    def drain(self) -> None:
        """Let each stream end with its last call."""
        self._is_draining = True
        for stream in self._shared:
            stream.drain()

    async def DecodeMany(  # type: ignore[override]  # noqa: D102
        self, request_iterator: AsyncIterator[pb.DecodeManyRequest], context: Context
    ) -> None:
        stream = SharedStream(self._serve, self._tracker)
        self._shared.add(stream)
        if self._is_draining:
            stream.drain()
        try:
            async with error_boundary(context, "DecodeMany"):
                await send_headers(context)
                await stream.run(request_iterator, context.write)
        finally:
            self._shared.discard(stream)

    async def _serve(self, request: pb.DecodeRequest, outlet: Outlet) -> None:
        await DecodeCall(self._runtime, self._directs, outlet).run(request)


class DirectService(decode_pb2_grpc.DirectServiceServicer):
    """Serves clients that a router has sent here."""

    def __init__(self, directs: DirectTable) -> None:
        self._directs = directs

    async def StreamTokens(  # type: ignore[override]  # noqa: D102
        self, request: pb.StreamTokensRequest, context: Context
    ) -> None:
        async with error_boundary(context, "StreamTokens"):
            answer = self._directs.claim(request.capability)
            await answer.stream(request.num_received, context.write)


def decode_services(runtime: WorkerRuntime) -> list[PlaneService]:
    """Return the services of the decode pool on a runtime."""
    directs = DirectTable()
    service = DecodeService(runtime, directs)
    runtime.on_drain.append(service.drain)
    return [
        PlaneService(Plane.CONTROL, decode_pb2_grpc.add_DecodeServiceServicer_to_server, service),
        PlaneService(Plane.DIRECT, decode_pb2_grpc.add_DirectServiceServicer_to_server, DirectService(directs)),
    ]

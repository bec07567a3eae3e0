"""PrefixService: lists the most valuable prefixes in this worker's cache, and pulls those of others."""

import math
from typing import Any

import grpc

from common.errors import InvalidRequest
from common.prefix_wire import MAX_BLOCKS, chains_from_proto, chains_to_proto
from common.rpc import error_boundary
from kvrelay.v1 import prefix_pb2 as pb
from kvrelay.v1 import prefix_pb2_grpc
from worker.prefix_intake import IntakeLimit, PrefixIntake
from worker.runtime import WorkerRuntime

MAX_TIME_S = 600.0

Context = grpc.aio.ServicerContext[Any, Any]


class PrefixService(prefix_pb2_grpc.PrefixServiceServicer):
    """Serves one runtime."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._intake = PrefixIntake(runtime.prefixes, block_bytes=runtime.executor.kv.shape.block_bytes)

    async def ListHotPrefixes(  # noqa: D102
        self, request: pb.ListHotPrefixesRequest, context: Context
    ) -> pb.ListHotPrefixesResponse:
        async with error_boundary(context, "ListHotPrefixes"):
            if not request.max_blocks:
                raise InvalidRequest("must be at least 1", field="max_blocks")
            max_blocks = min(request.max_blocks, MAX_BLOCKS)
            chains = await self._runtime.engine.call(lambda core: core.hot_prefixes(max_blocks))
            return pb.ListHotPrefixesResponse(
                chains=chains_to_proto(chains),
                block_bytes=self._runtime.executor.kv.shape.block_bytes,
                epoch=self._runtime.epoch,
                kv_port=self._runtime.ports.kv,
            )

    async def PullPrefixes(  # noqa: D102
        self, request: pb.PullPrefixesRequest, context: Context
    ) -> pb.PullPrefixesResponse:
        async with error_boundary(context, "PullPrefixes"):
            chains = chains_from_proto(request.chains)
            limit = self._checked_limit(request)
            with self._runtime.transfer_task():
                intake = await self._intake.take(chains, request.source, limit)
            num_asked = sum(len(chain.hashes) for chain in chains)
            return pb.PullPrefixesResponse(
                num_pulled_blocks=intake.num_pulled,
                num_present_blocks=intake.num_present,
                num_left_blocks=max(0, num_asked - intake.num_pulled - intake.num_present),
            )

    def _checked_limit(self, request: pb.PullPrefixesRequest) -> IntakeLimit:
        for name in ("worker_id", "address", "epoch"):
            if not getattr(request.source, name):
                raise InvalidRequest("is missing", field=f"source.{name}")
        if request.source.worker_id == self._runtime.worker_id:
            raise InvalidRequest("a worker does not pull from itself", field="source.worker_id")
        if not (math.isfinite(request.time_limit_s) and 0 < request.time_limit_s <= MAX_TIME_S):
            raise InvalidRequest(
                f"{request.time_limit_s:g}; must be above 0, at most {MAX_TIME_S:g}", field="time_limit_s"
            )
        if not request.max_bytes:
            raise InvalidRequest("must be at least 1", field="max_bytes")
        return IntakeLimit(time_s=request.time_limit_s, max_bytes=request.max_bytes)

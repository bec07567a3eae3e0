"""PrefixService: lists the most valuable prefixes in this worker's cache, pulls those of others, and reads tiers ahead.

The former are the prefixes of a worker that leaves, or the first ones of a new worker. Chains are pulled most valuable
first, in pieces of a few megabytes. Each piece is pulled like the prefix of a request (`prefix_pull.py`: pinned there,
verified and published here), and the engine serves others between two pieces. A piece gets only pages that are empty
or hold less valuable blocks, and none that waiting requests need.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from common.block_hash import HASH_BYTES, ROOT_BYTES, BlockHashes
from common.errors import InvalidRequest, KvrelayError
from common.ids import HashRoot
from common.prefix_chains import MAX_BLOCKS, PrefixChain, chains_from_proto, chains_to_proto, whole_chain
from common.rpc import error_boundary
from kvrelay.v1 import prefix_pb2 as pb
from kvrelay.v1 import prefix_pb2_grpc, sequence_pb2
from worker.prefix_pull import PrefixPuller, PullOutcome
from worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
_GOES_ON = (PullOutcome.PULLED, PullOutcome.PRESENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimit:
    """Limits of one list."""

    time_s: float
    max_bytes: int


@dataclass(slots=True, kw_only=True)
class Intake:
    """Result of one list."""

    num_pulled: int = 0
    """Blocks that were pulled."""
    num_present: int = 0
    """Blocks that were here already."""


class PrefixIntake:
    """Takes in lists for one worker, one at a time. Event loop only."""

    def __init__(self, puller: PrefixPuller, *, block_bytes: int) -> None:
        self._puller = puller
        self._block_bytes = block_bytes
        self._one_at_a_time = asyncio.Lock()

    async def take(self, chains: Sequence[PrefixChain], source: sequence_pb2.KvSource, limit: IntakeLimit) -> Intake:
        """Pull what fits. Raises KvrelayError when the source fails before the first block; later blocks stay."""
        intake = Intake()
        num_at_most = limit.max_bytes // self._block_bytes
        try:
            async with asyncio.timeout(limit.time_s), self._one_at_a_time:
                for idx, chain in enumerate(chains):
                    if num_at_most <= intake.num_pulled:
                        break
                    whole = whole_chain(chains, idx)
                    await self._take_chain(whole, chain.num_shared, source, num_at_most, intake)
        except TimeoutError:
            pass
        except KvrelayError as error:
            if not intake.num_pulled:
                raise
            logger.warning("source of prefixes lost", extra={"source": source.worker_id, "reason": str(error)})
        extra = {"source": source.worker_id, "num_pulled": intake.num_pulled, "num_present": intake.num_present}
        logger.info("prefixes taken in", extra=extra)
        return intake

    async def _take_chain(
        self, whole: PrefixChain, num_shared: int, source: sequence_pb2.KvSource, num_at_most: int, intake: Intake
    ) -> None:
        num_blocks = 0
        num_piece = max(1, PIECE_BYTES // self._block_bytes)
        while num_blocks < len(whole.hashes) and intake.num_pulled < num_at_most:
            max_blocks = min(num_piece, num_at_most - intake.num_pulled)
            result = await self._puller.pull_chain(whole, source, max_blocks=max_blocks)
            intake.num_present += max(0, result.num_cached_blocks - max(num_blocks, num_shared))
            intake.num_pulled += result.num_blocks - result.num_cached_blocks
            if result.outcome not in _GOES_ON or result.num_blocks <= num_blocks:
                return
            num_blocks = result.num_blocks


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
            with self._runtime.calls.transfer():
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
            with self._runtime.calls.transfer():
                intake = await self._intake.take(chains, request.source, limit)
            num_asked = sum(len(chain.hashes) for chain in chains)
            return pb.PullPrefixesResponse(
                num_pulled_blocks=intake.num_pulled,
                num_present_blocks=intake.num_present,
                num_left_blocks=max(0, num_asked - intake.num_pulled - intake.num_present),
            )

    async def ReadAhead(self, request: pb.ReadAheadRequest, context: Context) -> pb.ReadAheadResponse:  # noqa: D102
        async with error_boundary(context, "ReadAhead"):
            if len(request.hash_root) != ROOT_BYTES:
                raise InvalidRequest(f"has {len(request.hash_root)} bytes, not {ROOT_BYTES}", field="hash_root")
            num_bytes = len(request.block_hashes)
            if not 0 < num_bytes <= MAX_BLOCKS * HASH_BYTES or num_bytes % HASH_BYTES:
                why = f"{num_bytes} bytes are not 1 to {MAX_BLOCKS} hashes of {HASH_BYTES} bytes each"
                raise InvalidRequest(why, field="block_hashes")
            time_limit_s = _checked_time(request.time_limit_s)
            self._runtime.check_epoch(request.epoch)
            hashes, root = BlockHashes(request.block_hashes), HashRoot(request.hash_root)
            with self._runtime.calls.transfer():
                num_read = await self._runtime.read_ahead.read(hashes, root, time_limit_s=time_limit_s)
            return pb.ReadAheadResponse(num_read_blocks=num_read)

    def _checked_limit(self, request: pb.PullPrefixesRequest) -> IntakeLimit:
        for name in ("worker_id", "address", "epoch"):
            if not getattr(request.source, name):
                raise InvalidRequest("is missing", field=f"source.{name}")
        if request.source.worker_id == self._runtime.worker_id:
            raise InvalidRequest("a worker does not pull from itself", field="source.worker_id")
        time_s = _checked_time(request.time_limit_s)
        if not request.max_bytes:
            raise InvalidRequest("must be at least 1", field="max_bytes")
        return IntakeLimit(time_s=time_s, max_bytes=request.max_bytes)


def _checked_time(time_limit_s: float) -> float:
    if not (math.isfinite(time_limit_s) and 0 < time_limit_s <= MAX_TIME_S):
        raise InvalidRequest(f"{time_limit_s:g}; must be above 0, at most {MAX_TIME_S:g}", field="time_limit_s")
    return time_limit_s

"""Sizes and timing models that workers report of themselves."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from common.errors import EngineFault, from_rpc_error
from common.rpc import Connect
from common.timing import GUESSED_LINK, TimingModel, timing_from_proto
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWorker:
    """A worker's size and speed."""

    timing: TimingModel
    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of a token, all layers."""
        return self.block_bytes // self.block_size


async def ask_worker(address: str, connect: Connect) -> MeasuredWorker:
    """Return the facts of the worker whose control is at HOST:PORT. Raises KvrelayError."""
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            facts = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=_TIMEOUT_S)
            told = await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    if not told.HasField("timing"):
        raise EngineFault(f"worker {address} reports no timing: start it from this version of kvrelay")
    return MeasuredWorker(
        timing=timing_from_proto(told.timing),
        num_blocks=facts.num_blocks,
        block_size=facts.layout.block_size,
        block_bytes=facts.layout.block_bytes,
    )


def best_known(workers: Sequence[MeasuredWorker]) -> TimingModel:
    """Return a timing model for equal workers, at least one: each part from the one with most samples."""
    prefill = max((worker.timing for worker in workers), key=lambda timing: timing.prefill.num_samples)
    decode = max((worker.timing for worker in workers), key=lambda timing: timing.decode.num_samples)
    links = [link for worker in workers if (link := worker.timing.links.get(None)) is not None]
    return TimingModel(
        prefill=prefill.prefill,
        decode=decode.decode,
        max_step_tokens=prefill.max_step_tokens,
        links={None: max(links, key=lambda link: link.num_samples, default=GUESSED_LINK)},
    )

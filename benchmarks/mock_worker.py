"""Answers of every mock worker: a description, a load report without load, and an empty status."""

import asyncio
from typing import Any

import grpc

from common.block_hash import hash_probe, hash_root
from common.ids import mint_epoch
from common.kv_events import KvEvents, encode_events
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from router.reading.codec import ByteCodec

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 20
FINGERPRINT = "mock"

Context = grpc.aio.ServicerContext[Any, Any]


class MockWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker without an engine; routers count it as idle."""

    def __init__(self, worker_id: str, role: worker_pb2.WorkerRole.ValueType) -> None:
        self.direct_port = 0
        """Port where clients take their tokens; 0 without one."""
        self._epoch = mint_epoch()
        self._worker_id = worker_id
        self._role = role

    async def DescribeWorker(  # noqa: D102
        self, request: worker_pb2.DescribeWorkerRequest, context: Context
    ) -> worker_pb2.DescribeWorkerResponse:
        return worker_pb2.DescribeWorkerResponse(
            worker_id=self._worker_id,
            epoch=self._epoch,
            role=self._role,
            layout=worker_pb2.KvLayout(block_size=BLOCK_SIZE, fingerprint=FINGERPRINT),
            num_blocks=NUM_BLOCKS,
            max_model_len=1 << 20,
            vocab_size=50_000,
            model_name="mock",
            tokenizer_probe=ByteCodec.probes.tokenizer,
            template_probe=ByteCodec.probes.template,
            hash_probe=hash_probe(hash_root(model_fingerprint=FINGERPRINT), BLOCK_SIZE),
            direct_port=self.direct_port,
        )

    async def WatchWorker(  # type: ignore[override]  # noqa: D102
        self, request: worker_pb2.WatchWorkerRequest, context: Context
    ) -> None:
        update = worker_pb2.WatchWorkerResponse(
            epoch=self._epoch,
            kv_events=encode_events(KvEvents(is_snapshot=True)),
            load=worker_pb2.LoadReport(num_free_blocks=NUM_BLOCKS, num_blocks=NUM_BLOCKS),
        )
        while True:
            await context.write(update)
            await asyncio.sleep(request.heartbeat_s or 3600)
            update = worker_pb2.WatchWorkerResponse(epoch=self._epoch, seq=update.seq + 1, load=update.load)

    async def GetWorkerStatus(  # noqa: D102
        self, request: worker_pb2.GetWorkerStatusRequest, context: Context
    ) -> worker_pb2.GetWorkerStatusResponse:
        return worker_pb2.GetWorkerStatusResponse(status=worker_pb2.WorkerStatus(epoch=self._epoch))

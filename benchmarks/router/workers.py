"""Workers that compute nothing: a prompt is done at once, and every call gets one token a step.

    python -m benchmarks.router.workers NUM_WORKERS --itl-ms 5      prints the ports, then serves until it is killed

A step takes the given time, or as long as the router reads with 0. The certificate, one for all workers, comes on
stdin (`children.py`). Even workers decode, odd ones prefill. No KV moves: a decode worker says at once that its blocks
have come. Routers reach a worker at its control, as a real one; clients at its direct door, whose port it reports.
Its cost is not the router's: it exists so that a router can be loaded without an engine on the same two cores.
"""

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop

from benchmarks.router.children import HOST, enrol_child
from common.block_hash import hash_probe, hash_root
from common.config import TlsConfig
from common.ids import mint_epoch
from common.kv_events import KvEvents, encode_events
from common.process import die_with_parent
from common.rpc_server import Server, start_server
from common.trust.access import Audience
from common.trust.credentials import Credentials
from common.trust.doors import door_of
from common.trust.guard import Guard
from decode_worker.direct import DirectAnswer, DirectTable
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from router.reading.codec import ByteCodec

ROLES = (worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_PREFILL)
TEXT = " token"
_BLOCK_SIZE = 16
_NUM_BLOCKS = 1 << 20
_FINGERPRINT = "mock"

Context = grpc.aio.ServicerContext[Any, Any]


def worker_id_of(number: int) -> str:
    """Return the name of a worker."""
    return f"w{number}"


@dataclass(slots=True)
class _Call:
    tokens: Iterator[sampling_pb2.SampleToken]
    opening: list[decode_pb2.DecodeResponse]
    direct: DirectAnswer | None = None
    checkpoints: list[decode_pb2.TokenBatch] = field(default_factory=list)


class MockWorker(
    worker_pb2_grpc.WorkerServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    decode_pb2_grpc.DirectServiceServicer,
    inference_pb2_grpc.InferenceServiceServicer,
):
    """Serves routers, and bare streams to clients: what gRPC alone costs the sender of the tokens."""

    def __init__(self, number: int, itl_s: float) -> None:
        self.direct_port = 0
        self._worker_id = worker_id_of(number)
        self._role = ROLES[number % 2]
        self._epoch = mint_epoch()
        self._itl_s = itl_s
        self._directs = DirectTable()
        self._ticked = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    async def DescribeWorker(  # noqa: D102
        self, request: worker_pb2.DescribeWorkerRequest, context: Context
    ) -> worker_pb2.DescribeWorkerResponse:
        return worker_pb2.DescribeWorkerResponse(
            worker_id=self._worker_id,
            epoch=self._epoch,
            role=self._role,
            layout=worker_pb2.KvLayout(block_size=_BLOCK_SIZE, fingerprint=_FINGERPRINT),
            num_blocks=_NUM_BLOCKS,
            max_model_len=1 << 20,
            vocab_size=50_000,
            model_name="mock",
            tokenizer_probe=ByteCodec.probes.tokenizer,
            template_probe=ByteCodec.probes.template,
            hash_probe=hash_probe(hash_root(model_fingerprint=_FINGERPRINT), _BLOCK_SIZE),
            direct_port=self.direct_port,
        )

    async def WatchWorker(  # type: ignore[override]  # noqa: D102
        self, request: worker_pb2.WatchWorkerRequest, context: Context
    ) -> None:
        update = worker_pb2.WatchWorkerResponse(
            epoch=self._epoch,
            kv_events=encode_events(KvEvents(is_snapshot=True)),
            load=worker_pb2.LoadReport(num_free_blocks=_NUM_BLOCKS, num_blocks=_NUM_BLOCKS),
        )
        while True:
            await context.write(update)
            await asyncio.sleep(request.heartbeat_s or 3600)
            update = worker_pb2.WatchWorkerResponse(epoch=self._epoch, seq=update.seq + 1, load=update.load)

    async def GetWorkerStatus(  # noqa: D102
        self, request: worker_pb2.GetWorkerStatusRequest, context: Context
    ) -> worker_pb2.GetWorkerStatusResponse:
        return worker_pb2.GetWorkerStatusResponse(status=worker_pb2.WorkerStatus(epoch=self._epoch))

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        await context.write(prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted()))
        first = next(_tokens(0, request.sequence.sampling.max_tokens))
        finished = prefill_pb2.PrefillFinished(first_tokens=[first], prefill_s=0.0)
        await context.write(prefill_pb2.PrefillResponse(finished=finished))

    async def DecodeMany(  # type: ignore[override]  # noqa: D102
        self, request_iterator: AsyncIterator[decode_pb2.DecodeManyRequest], context: Context
    ) -> None:
        calls: dict[int, _Call] = {}
        has_calls = asyncio.Event()
        writing = asyncio.create_task(self._write_steps(calls, has_calls, context))
        try:
            async for first in request_iterator:
                for request in (first, *first.others):
                    if request.HasField("open"):
                        calls[request.call_id] = self._begin(request.open)
                        has_calls.set()
                    else:
                        calls.pop(request.call_id, None)
        finally:
            writing.cancel()

    async def _write_steps(self, calls: dict[int, "_Call"], has_calls: asyncio.Event, context: Context) -> None:
        async for _ in self._steps():
            if not calls:
                has_calls.clear()
                await has_calls.wait()
            message = decode_pb2.DecodeManyResponse()
            for call_id, call in list(calls.items()):
                if call.opening:
                    message.updates.add(call_id=call_id, responses=call.opening)
                    call.opening = []
                token = next(call.tokens, None)
                if token is None:
                    message.updates.add(call_id=call_id, status_code=0)
                    del calls[call_id]
                elif call.direct is None:
                    message.updates.add(call_id=call_id).responses.add().tokens.tokens.append(token)
                else:
                    call.direct.put(decode_pb2.TokenBatch(tokens=[token]))
                    if call.checkpoints:
                        responses = [decode_pb2.DecodeResponse(tokens=batch) for batch in call.checkpoints]
                        message.updates.add(call_id=call_id, responses=responses)
                        call.checkpoints.clear()
            if message.updates:
                await context.write(message)

    def _begin(self, request: decode_pb2.DecodeRequest) -> "_Call":
        opening = [decode_pb2.DecodeResponse(reserved=decode_pb2.Reserved())]
        is_handoff = request.HasField("handoff")
        if is_handoff:  # its first token came with the prompt
            opening.append(decode_pb2.DecodeResponse(transferred=worker_pb2.TransferStats(num_blocks=1)))
        else:
            opening.append(decode_pb2.DecodeResponse(prefill_started=decode_pb2.LocalPrefillStarted()))
        call = _Call(_tokens(int(is_handoff), request.sequence.sampling.max_tokens), opening)
        if request.HasField("direct"):
            call.direct = DirectAnswer(request.direct, range(1), (), call.checkpoints.append, lambda _error: None)
            self._directs.add(call.direct)
        return call

    async def StreamTokens(  # type: ignore[override]  # noqa: D102
        self, request: decode_pb2.StreamTokensRequest, context: Context
    ) -> None:
        await self._directs.claim(request.capability).stream(request.num_received, context.write)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
        for token in _tokens(0, request.sampling.max_tokens):
            await self._ticked.wait()
            message = inference_pb2.GenerateResponse()
            message.tokens.tokens.append(token)
            await context.write(message)

    async def _tick(self) -> None:
        """Wake all bare streams at once, as a step does."""
        async for _ in self._steps():
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()

    async def _steps(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            yield
            next_s = max(next_s + self._itl_s, loop.time() - self._itl_s)
            await asyncio.sleep(max(next_s - loop.time(), 0.0))


def _tokens(first: int, max_tokens: int) -> Iterator[sampling_pb2.SampleToken]:
    last = max_tokens - 1
    for index in itertools.takewhile(lambda index: index <= last, itertools.count(first)):
        reason = sampling_pb2.FINISH_REASON_LENGTH if index == last else sampling_pb2.FINISH_REASON_UNSPECIFIED
        yield sampling_pb2.SampleToken(token_index=index, token_id=index % 250, text=TEXT, finish_reason=reason)


async def _start(worker: MockWorker, credentials: Credentials) -> list[Server]:
    """Serve a worker; returns its control and its direct door."""

    def add_control(server: grpc.aio.Server) -> list[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
        return []

    def add_direct(server: grpc.aio.Server) -> list[str]:
        decode_pb2_grpc.add_DirectServiceServicer_to_server(worker, server)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(worker, server)
        return []

    door = Guard(credentials, Audience.CLIENTS, door=door_of(TlsConfig(), credentials))
    direct = await start_server(add_direct, host=HOST, port=0, guard=door)
    worker.direct_port = direct.port
    control = await start_server(add_control, host=HOST, port=0, guard=Guard(credentials, Audience.INSIDERS))
    return [control, direct]


async def _serve(num_workers: int, itl_s: float) -> None:
    credentials = await enrol_child()
    # A server without a reference stops.
    servers = [await _start(MockWorker(number, itl_s), credentials) for number in range(num_workers)]  # type: ignore[abstract]
    print(*(control.port for control, _direct in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Workers that compute nothing.")
    parser.add_argument("workers", type=int, help="number of workers")
    parser.add_argument("--itl-ms", type=float, default=5.0, help="time of a step; 0: as fast as the router reads")
    args = parser.parse_args()
    die_with_parent()
    uvloop.run(_serve(args.workers, args.itl_ms / 1000))

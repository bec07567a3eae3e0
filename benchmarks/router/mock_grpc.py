"""kvrelay mock workers: the workers' gRPC services without engines; a prompt is done at once, then come the tokens.

    python -m benchmarks.router.mock_grpc NUM_WORKERS      prints the ports, then serves until it is killed

Its certificate, one for all of them, comes on stdin (`benchmarks.trust`). Even workers prefill, odd ones decode. No KV
moves: a decode worker says at once that its blocks have come.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator

import grpc
import uvloop

from benchmarks.mock_worker import Context, MockWorker
from benchmarks.trust import HOST, enrol_child
from common.process import die_with_parent
from common.rpc_server import Server, start_server
from common.trust.access import Audience
from common.trust.guard import Guard
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    sequence_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

_ROLES = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)


def _token(index: int, sequence: sequence_pb2.SequenceSpec) -> sampling_pb2.SampleToken:
    is_last = index + 1 >= sequence.sampling.max_tokens
    reason = sampling_pb2.FINISH_REASON_LENGTH if is_last else sampling_pb2.FINISH_REASON_UNSPECIFIED
    return sampling_pb2.SampleToken(token_index=index, token_id=7, text="word ", finish_reason=reason)


def _answers(request: decode_pb2.DecodeRequest) -> Iterator[decode_pb2.DecodeResponse]:
    yield decode_pb2.DecodeResponse(reserved=decode_pb2.Reserved())
    first = 0
    if request.HasField("handoff"):
        yield decode_pb2.DecodeResponse(transferred=worker_pb2.TransferStats(num_blocks=1))
        first = 1
    else:
        yield decode_pb2.DecodeResponse(prefill_started=decode_pb2.LocalPrefillStarted())
    for index in range(first, request.sequence.sampling.max_tokens):
        batch = decode_pb2.TokenBatch(tokens=[_token(index, request.sequence)])
        yield decode_pb2.DecodeResponse(tokens=batch)


class InstantWorker(MockWorker, prefill_pb2_grpc.PrefillServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    """One worker that answers at once."""

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        await context.write(prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted()))
        finished = prefill_pb2.PrefillFinished(first_tokens=[_token(0, request.sequence)], prefill_s=0.0)
        await context.write(prefill_pb2.PrefillResponse(finished=finished))

    async def DecodeMany(  # type: ignore[override]  # noqa: D102
        self, request_iterator: AsyncIterator[decode_pb2.DecodeManyRequest], context: Context
    ) -> None:
        async for first in request_iterator:
            for message in (first, *first.others):
                if not message.HasField("open"):
                    continue
                for answer in _answers(message.open):
                    update = decode_pb2.CallUpdate(call_id=message.call_id, responses=[answer])
                    await context.write(decode_pb2.DecodeManyResponse(updates=[update]))
                end = decode_pb2.CallUpdate(call_id=message.call_id, status_code=0)
                await context.write(decode_pb2.DecodeManyResponse(updates=[end]))


async def _serve(num_workers: int) -> None:
    credentials = await enrol_child()
    servers: list[Server] = []  # a server without a reference stops
    for number in range(num_workers):
        worker = InstantWorker(f"w{number}", _ROLES[number % 2])  # type: ignore[abstract]

        def add(server: grpc.aio.Server, worker: InstantWorker = worker) -> list[str]:
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server)
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
            return []

        guard = Guard(credentials, Audience.INSIDERS)
        servers.append(await start_server(add, host=HOST, port=0, guard=guard))
    print(*(server.port for server in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(_serve(int(sys.argv[1])))

"""A decode worker that computes nothing: every call gets one token a step, at a given pace or as fast as it is read.

`python -m benchmarks.token_worker --itl-ms 5` gets its certificate on stdin and prints a ready line (common.process).
Its cost is not the router's: it exists so that a router can be loaded without an engine on the same two cores.
Routers reach it at its control, as a real worker; clients at its direct door, whose port it reports to routers.
"""

import argparse
import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import grpc
import uvloop

from benchmarks.mock_worker import Context, MockWorker
from benchmarks.trust import HOST, enrol_child
from common.config import TlsConfig
from common.process import Ready, die_with_parent, ready_line
from common.rpc_server import start_server
from common.trust.access import Audience
from common.trust.doors import door_of
from common.trust.guard import Guard
from decode_worker.direct import DirectAnswer, DirectTable
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

WORKER_ID = "token-worker"
TEXT = " token"


@dataclass(slots=True)
class _Call:
    tokens: Iterator[sampling_pb2.SampleToken]
    direct: DirectAnswer | None = None
    checkpoints: list[decode_pb2.TokenBatch] = field(default_factory=list)


class TokenWorker(
    MockWorker,
    decode_pb2_grpc.DecodeServiceServicer,
    decode_pb2_grpc.DirectServiceServicer,
    inference_pb2_grpc.InferenceServiceServicer,
):
    """Serves routers, and bare streams to clients: what gRPC alone costs the sender of the tokens."""

    def __init__(self, itl_s: float) -> None:
        super().__init__(WORKER_ID, worker_pb2.WORKER_ROLE_DECODE)
        self._itl_s = itl_s
        self._directs = DirectTable()
        self._ticked = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    async def DecodeMany(  # type: ignore[override]  # noqa: D102
        self, request_iterator: AsyncIterator[decode_pb2.DecodeManyRequest], context: Context
    ) -> None:
        calls: dict[int, _Call] = {}
        new: list[int] = []
        writing = asyncio.create_task(self._write_steps(calls, new, context))
        try:
            async for first in request_iterator:
                for request in (first, *first.others):
                    if request.HasField("open"):
                        calls[request.call_id] = self._begin(request.open)
                        new.append(request.call_id)
                    else:
                        calls.pop(request.call_id, None)
        finally:
            writing.cancel()

    async def _write_steps(self, calls: dict[int, "_Call"], new: list[int], context: Context) -> None:
        async for _ in self._steps():
            message = decode_pb2.DecodeManyResponse()
            for call_id in new:
                message.updates.add(call_id=call_id, responses=_opening())
            new.clear()
            for call_id, call in list(calls.items()):
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
        call = _Call(_tokens(request))
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
        for token in _tokens_up_to(request.sampling.max_tokens):
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
            next_s += self._itl_s
            await asyncio.sleep(max(next_s - loop.time(), 0.0))


def _opening() -> list[decode_pb2.DecodeResponse]:
    return [
        decode_pb2.DecodeResponse(reserved=decode_pb2.Reserved()),
        decode_pb2.DecodeResponse(prefill_started=decode_pb2.LocalPrefillStarted()),
    ]


def _tokens(request: decode_pb2.DecodeRequest) -> Iterator[sampling_pb2.SampleToken]:
    return _tokens_up_to(request.sequence.sampling.max_tokens)


def _tokens_up_to(max_tokens: int) -> Iterator[sampling_pb2.SampleToken]:
    last = max_tokens - 1
    for index in itertools.count():
        reason = sampling_pb2.FINISH_REASON_LENGTH if index == last else sampling_pb2.FINISH_REASON_UNSPECIFIED
        yield sampling_pb2.SampleToken(token_index=index, token_id=index % 250, text=TEXT, finish_reason=reason)
        if index == last:
            return


async def _serve(itl_s: float) -> None:
    credentials = await enrol_child()
    worker = TokenWorker(itl_s)  # type: ignore[abstract]  # it has no other calls than those that are measured

    def add_control(server: grpc.aio.Server) -> list[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
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
    address = f"{HOST}:{control.port}"
    ready = Ready(address=address, admin_address=address, metrics_port=0, pid=os.getpid())
    sys.stdout.write(ready_line(ready) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="A decode worker that computes nothing.")
    parser.add_argument("--itl-ms", type=float, default=5.0, help="time of a step; 0: as fast as the router reads")
    args = parser.parse_args()
    die_with_parent()
    uvloop.run(_serve(args.itl_ms / 1000))


if __name__ == "__main__":
    main()

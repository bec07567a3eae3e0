"""One prefill and one decode worker with fake engines in this process, driven over real gRPC on free ports."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.config import parse_config
from common.fake_tokenizer import byte_tokenizer
from common.ids import WorkerId, mint_handoff_id
from common.rpc import client_channel
from common.wire import pack_tokens, sampling_to_proto
from decode_worker.server import add_services as add_decode
from engine.fake import FakeExecutor
from engine.sequence import EngineRequest
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, sequence_pb2, worker_pb2
from prefill_worker.server import add_services as add_prefill
from tests.builders import BLOCK_SIZE
from worker.runtime import REAL, WorkerRuntime
from worker.shell import AddServices, RunningWorker, start_worker


def spec_of(request: EngineRequest) -> sequence_pb2.SequenceSpec:
    """Return the message for a request."""
    return sequence_pb2.SequenceSpec(
        request_id=request.request_id,
        prompt_tokens=pack_tokens(request.prompt_token_ids),
        output_tokens=pack_tokens(request.output_token_ids),
        block_hashes=request.block_hashes.packed,
        hash_root=request.hash_root,
        sampling=sampling_to_proto(request.sampling),
        first_sample_index=request.first_sample_index,
    )


@dataclass
class Answer:
    """What a handoff delivered."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    transfer: worker_pb2.TransferStats | None = None
    num_decode_cached: int = 0

    def take(self, token: Any) -> None:
        """Append one token; indexes must be consecutive."""
        mine = self.tokens.setdefault(token.sample_index, [])
        assert token.token_index == len(mine), (token.token_index, len(mine))
        mine.append(token.token_id)
        self.text[token.sample_index] = self.text.get(token.sample_index, "") + token.text


@dataclass
class Pair:
    """A running pair of workers."""

    prefill: RunningWorker
    decode: RunningWorker
    prefill_stub: Any
    decode_stub: Any

    def handoff(self, handoff_id: str) -> decode_pb2.Handoff:
        """Return the message that tells the decode worker where to pull from."""
        return decode_pb2.Handoff(
            handoff_id=handoff_id,
            prefill_worker_id=self.prefill.runtime.worker_id,
            prefill_address=self.prefill.address,
            prefill_epoch=self.prefill.runtime.epoch,
        )

    def open_decode(self, request: EngineRequest, handoff_id: str | None) -> Any:
        """Open a Decode call."""
        message = decode_pb2.DecodeRequest(sequence=spec_of(request), epoch=self.decode.runtime.epoch)
        if handoff_id is not None:
            message.handoff.CopyFrom(self.handoff(handoff_id))
        return self.decode_stub.Decode(message)

    def open_prefill(self, request: EngineRequest, handoff_id: str) -> Any:
        """Open a Prefill call."""
        return self.prefill_stub.Prefill(
            prefill_pb2.PrefillRequest(
                sequence=spec_of(request), handoff_id=handoff_id, epoch=self.prefill.runtime.epoch
            )
        )

    async def generate(self, request: EngineRequest) -> Answer:
        """Serve a request by handoff, as a router would."""
        handoff_id = mint_handoff_id()
        answer = Answer()
        decode = self.open_decode(request, handoff_id)
        first = await decode.read()
        answer.num_decode_cached = first.reserved.num_cached_tokens
        async for message in self.open_prefill(request, handoff_id):
            for token in message.finished.first_tokens:
                answer.take(token)
        async for message in messages(decode):
            if message.HasField("transferred"):
                answer.transfer = message.transferred
            for token in message.tokens.tokens:
                answer.take(token)
        return answer

    async def generate_locally(self, request: EngineRequest) -> Answer:
        """Serve a request on the decode worker alone."""
        answer = Answer()
        async for message in self.open_decode(request, None):
            for token in message.tokens.tokens:
                answer.take(token)
        return answer

    async def until_empty(self) -> None:
        """Wait (bounded) until neither worker holds anything."""
        async with asyncio.timeout(5):
            for worker in (self.prefill, self.decode):
                runtime = worker.runtime
                while True:
                    load = await runtime.engine.call(lambda core: core.load())
                    held = load.num_used_blocks + load.num_reserved + load.num_held + load.num_running
                    if held + load.num_waiting + runtime.handoffs.num_leases + runtime.num_request_tasks == 0:
                        break


def make_runtime(role: Any, worker_id: str, *, transports: Sequence[str], **fake: Any) -> WorkerRuntime:
    """Return a runtime over a fake engine."""
    pool = {
        "block_size": BLOCK_SIZE,
        "max_step_tokens": fake.pop("max_step_tokens", 32),
        "max_running": 16,
        "metrics": False,
    }
    transfer = {"transports": list(transports), "chunk_bytes": 4096, "lease_ttl_s": fake.pop("lease_ttl_s", 5.0)}
    config = parse_config(
        {"model": {"engine": "fake"}, "pools": {"prefill": pool, "decode": pool}, "transfer": transfer}, source="test"
    )
    executor = FakeExecutor(
        num_blocks=fake.pop("num_blocks", 128),
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        step_s=fake.pop("step_s", 0.0),
    )
    assert not fake, fake
    return WorkerRuntime(
        config=config,
        role=role,
        worker_id=WorkerId(worker_id),
        executor=executor,
        tokenizer=byte_tokenizer(),
        outside=REAL,
    )


@asynccontextmanager
async def running_pair(
    *,
    transports: Sequence[str] = ("grpc",),
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> AsyncIterator[Pair]:
    """Start both workers, and stop them with everything they own."""
    kinds: list[tuple[Any, str, AddServices, dict[str, Any]]] = [
        (worker_pb2.WORKER_ROLE_PREFILL, "prefill-0", add_prefill, dict(prefill or {})),
        (worker_pb2.WORKER_ROLE_DECODE, "decode-0", add_decode, dict(decode or {})),
    ]
    workers = [
        await start_worker(make_runtime(role, name, transports=transports, **fake), add, host="127.0.0.1", port=0)
        for role, name, add, fake in kinds
    ]
    channels = [client_channel(worker.address) for worker in workers]
    try:
        yield Pair(
            prefill=workers[0],
            decode=workers[1],
            prefill_stub=prefill_pb2_grpc.PrefillServiceStub(channels[0]),
            decode_stub=decode_pb2_grpc.DecodeServiceStub(channels[1]),
        )
    finally:
        for channel in channels:
            await channel.close()
        for worker in workers:
            await worker.stop(0)


async def messages(call: Any) -> AsyncIterator[Any]:
    """Read the rest of a call (a call that has been `read` cannot be iterated any more)."""
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    """Read a call to its end and return the error it must end with."""
    try:
        async for _message in messages(call):
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended without an error")

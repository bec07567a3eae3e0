"""One prefill and one decode worker with fake engines in this process, driven over real gRPC on free ports."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.worker_process.server import pool_services
from common.config import parse_config
from common.errors import KvrelayError, from_rpc_error
from common.fake_tokenizer import byte_tokenizer
from common.ids import Epoch, HandoffId, WorkerId, mint_handoff_id
from common.trust.identity import Role
from common.trust.tickets import PullRight, of_blocks, of_handoff
from common.wire import pack_tokens, sampling_to_proto
from engine.executor import Executor, ScheduledSequence, StepHandle
from engine.fake import FakeExecutor
from engine.request import EngineRequest
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sequence_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from router.decode_stream import DecodeStream
from tests.builders import BLOCK_SIZE, expected_tokens
from tests.clock import ManualClock
from tests.engine.beam_oracle import expected_beams
from tests.trust import ROUTER, as_router, credentials_of
from worker.environment import Environment
from worker.runtime import WorkerRuntime
from worker.serving import RunningWorker, start_worker

Source = sequence_pb2.KvSource | None


def spec_of(request: EngineRequest) -> sequence_pb2.SequenceSpec:
    """Return the message for a request."""
    return sequence_pb2.SequenceSpec(
        request_id=request.request_id,
        prompt_tokens=pack_tokens(request.prompt_token_ids),
        output_tokens=pack_tokens(request.output_token_ids),
        hash_root=request.hash_root,
        sampling=sampling_to_proto(request.sampling),
        first_sample_index=request.first_sample_index,
    )


@dataclass
class Answer:
    """An answer as a client sees it."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    transfer: worker_pb2.TransferStats | None = None
    num_decode_cached: int = 0
    num_cached: int = 0
    """On the worker that computed the prompt, pulled ones included."""
    num_pulled: int = 0

    def start(self, started: Any) -> None:
        """Take over what the computing worker found."""
        self.num_cached, self.num_pulled = started.num_cached_tokens, started.num_pulled_tokens

    def take(self, token: Any) -> None:
        """Append one token; indexes must be consecutive."""
        mine = self.tokens.setdefault(token.sample_index, [])
        assert token.token_index == len(mine), (token.token_index, len(mine))
        mine.append(token.token_id)
        self.text[token.sample_index] = self.text.get(token.sample_index, "") + token.text

    def checked(self, request: EngineRequest) -> "Answer":
        """Return this answer. Its tokens must be the oracle's, which knows no stop strings."""
        if request.sampling.has_beams:
            assert self.tokens == dict(enumerate(expected_beams(request)))
        elif not request.sampling.stop:
            assert self.tokens == {i: expected_tokens(request, sample=i) for i in range(request.sampling.n)}
        return self


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
            prefill_address=self.prefill.kv_address,
            prefill_epoch=self.prefill.runtime.epoch,
            ticket=ROUTER.issue(
                PullRight(
                    puller=self.decode.runtime.worker_id,
                    source=self.prefill.runtime.worker_id,
                    epoch=self.prefill.runtime.epoch,
                    subject=of_handoff(HandoffId(handoff_id)),
                )
            ),
        )

    def open_decode(self, request: EngineRequest, handoff_id: str | None, source: Source = None) -> "DecodeCall":
        """Open a decode call."""
        handoff = None if handoff_id is None else self.handoff(handoff_id)
        return self.open_decode_of(spec_of(request), handoff=handoff, source=allowed(source, request, self.decode))

    def open_decode_of(self, spec: sequence_pb2.SequenceSpec, **fields: Any) -> "DecodeCall":
        """Open a decode call for a message."""
        fields = {"epoch": self.decode.runtime.epoch} | fields
        return DecodeCall(self.decode_stub, decode_pb2.DecodeRequest(sequence=spec, **fields))

    def open_prefill(self, request: EngineRequest, handoff_id: str, source: Source = None) -> Any:
        """Open a Prefill call."""
        return self.prefill_stub.Prefill(
            prefill_pb2.PrefillRequest(
                sequence=spec_of(request),
                handoff_id=handoff_id,
                epoch=self.prefill.runtime.epoch,
                source=allowed(source, request, self.prefill),
            )
        )

    async def generate(self, request: EngineRequest, source: Source = None) -> Answer:
        """Serve a request by handoff, as a router would; its answer must be the oracle's."""
        handoff_id = mint_handoff_id()
        answer = Answer()
        decode = self.open_decode(request, handoff_id)
        first = await decode.read()
        answer.num_decode_cached = first.reserved.num_cached_tokens
        async for message in messages(self.open_prefill(request, handoff_id, source)):
            if message.HasField("started"):
                answer.start(message.started)
            for token in message.finished.first_tokens:
                answer.take(token)
        async for message in messages(decode):
            if message.HasField("transferred"):
                answer.transfer = message.transferred
            for token in message.tokens.tokens:
                answer.take(token)
        return answer.checked(request)

    async def generate_locally(self, request: EngineRequest, source: Source = None) -> Answer:
        """Serve a request on the decode worker alone; its answer must be the oracle's."""
        answer = Answer()
        async for message in messages(self.open_decode(request, None, source)):
            if message.HasField("prefill_started"):
                answer.start(message.prefill_started)
            for token in message.tokens.tokens:
                answer.take(token)
        return answer.checked(request)


class DecodeCall:
    """One decode call on a stream of its own; read like a call of gRPC."""

    def __init__(self, stub: Any, request: decode_pb2.DecodeRequest) -> None:
        self._stream = stub.DecodeMany()
        self._call = DecodeStream(self._stream).open(request)

    async def read(self) -> Any:
        """Return the next response, or EOF at a good end. Raises KvrelayError."""
        response = await self._call.receive()
        return grpc.aio.EOF if response is None else response

    def cancel(self) -> None:
        """Leave the stream."""
        self._stream.cancel()


def allowed(source: Source, request: EngineRequest, puller: RunningWorker) -> Source:
    """Return a source with a router's ticket for what a request's worker will ask it for."""
    if source is None:
        return None
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    num_blocks = min(source.num_blocks, (num_tokens - 1) // BLOCK_SIZE)
    right = PullRight(
        puller=puller.runtime.worker_id,
        source=WorkerId(source.worker_id),
        epoch=Epoch(source.epoch),
        subject=of_blocks(request.block_hashes[:num_blocks].packed),
    )
    with_ticket = sequence_pb2.KvSource(ticket=ROUTER.issue(right), num_blocks=num_blocks)
    with_ticket.MergeFrom(sequence_pb2.KvSource(worker_id=source.worker_id, address=source.address, epoch=source.epoch))
    return with_ticket


async def until_prefilled(call: Any) -> None:
    """Read a Prefill call up to the first tokens; it stays open until its handoff is over."""
    while not (await call.read()).HasField("finished"):
        pass


async def until_empty(worker: RunningWorker) -> None:
    """Wait (bounded) until a worker holds nothing."""
    runtime = worker.runtime
    async with asyncio.timeout(60):
        while True:
            load = await runtime.engine.call(lambda core: core.load())
            held = load.num_used_blocks + load.num_reserved + load.num_held + load.num_running
            if held + load.num_waiting + runtime.handoffs.num_leases + runtime.num_request_tasks == 0:
                return


class HeldSteps:
    """Holds back the steps of a worker's engine, but those that a test lets go."""

    def __init__(self, worker: RunningWorker) -> None:
        executor = worker.runtime.executor
        self._launch = executor.launch
        self._may_go = threading.Semaphore(0)
        self._is_over = False
        executor.launch = self._held  # type: ignore[method-assign]

    def let_go(self, num_steps: int = 1) -> None:
        """Let some more steps begin."""
        self._may_go.release(num_steps)

    def end(self) -> None:
        """Hold no step back any more."""
        self._is_over = True
        self._may_go.release()

    def _held(self, batch: Sequence[ScheduledSequence]) -> StepHandle:
        if not self._is_over:
            assert self._may_go.acquire(timeout=60)
        return self._launch(batch)


@contextmanager
def held_steps(worker: RunningWorker) -> Iterator[HeldSteps]:
    """Hold back a worker's steps inside the block.

    Its engine takes calls in until it is about to step; then they wait.
    """
    steps = HeldSteps(worker)
    try:
        yield steps
    finally:
        steps.end()


async def until_taken_in(worker: RunningWorker, num_calls: int) -> None:
    """Wait (bounded) until a worker has that many calls, all of which its engine knows at its next step."""
    async with asyncio.timeout(60):
        while worker.runtime.num_request_tasks < num_calls:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)


def stop_lease_clock(worker: RunningWorker) -> ManualClock:
    """Stop the clock by which a worker's leases run out; the test moves it."""
    clock = ManualClock()
    worker.runtime.handoffs._clock = clock  # noqa: SLF001
    return clock


def make_runtime(
    role: Any,
    worker_id: str,
    *,
    transports: Sequence[str],
    environment: Environment | None = None,
    executor: Executor | None = None,
    **fake: Any,
) -> WorkerRuntime:
    """Return a runtime over a fake engine, unless another one is given."""
    pool = {
        "block_size": BLOCK_SIZE if executor is None else executor.kv.shape.block_size,
        "max_step_tokens": fake.pop("max_step_tokens", 32),
        "max_running": fake.pop("max_running", 16),
        "metrics": False,
    }
    transfer = {"transports": list(transports), "chunk_bytes": 4096, "lease_ttl_s": fake.pop("lease_ttl_s", 5.0)}
    config = parse_config(
        {
            "model": {"engine": "fake"},
            "pools": {"prefill": pool, "decode": pool | fake.pop("decode_pool", {})},
            "transfer": transfer,
        },
        source="test",
    )
    executor = executor or FakeExecutor(
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
        environment=environment or Environment.real(credentials_of(Role.WORKER, worker_id)),
    )


@asynccontextmanager
async def running_pair(
    *,
    transports: Sequence[str] = ("grpc",),
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    ends_empty: bool = True,
) -> AsyncIterator[Pair]:
    """Start a `running_pool` of two."""
    fakes = {"prefill-0": prefill or {}, "decode-0": decode or {}}
    async with running_pool(fakes, transports=transports, ends_empty=ends_empty) as pool:
        yield pool.pair("prefill-0", "decode-0")


@dataclass
class Pool:
    """Running workers by name."""

    workers: dict[str, RunningWorker]
    channels: dict[str, grpc.aio.Channel]

    def pair(self, prefill: str, decode: str) -> Pair:
        """Return two of them as a pair."""
        return Pair(
            prefill=self.workers[prefill],
            decode=self.workers[decode],
            prefill_stub=prefill_pb2_grpc.PrefillServiceStub(self.channels[prefill]),
            decode_stub=decode_pb2_grpc.DecodeServiceStub(self.channels[decode]),
        )

    async def until_empty(self) -> None:
        """Wait (bounded) until no worker holds anything."""
        for worker in self.workers.values():
            await until_empty(worker)


@asynccontextmanager
async def running_pool(
    fakes: dict[str, dict[str, Any]], *, transports: Sequence[str] = ("grpc",), ends_empty: bool = True
) -> AsyncIterator[Pool]:
    """Start workers named prefill-… and decode-… with these fake engines, and stop them with everything they own.

    Waits (bounded) at the end of the block until no worker holds anything; without `ends_empty` it does not.
    """
    pool = Pool({}, {})
    try:
        for name, fake in fakes.items():
            is_prefill = name.startswith("prefill")
            role = worker_pb2.WORKER_ROLE_PREFILL if is_prefill else worker_pb2.WORKER_ROLE_DECODE
            # A lease ends when a test says so, not because the machine is busy.
            runtime = make_runtime(role, name, transports=transports, **({"lease_ttl_s": 60.0} | fake))
            worker = pool.workers[name] = await serve_runtime(runtime)
            pool.channels[name] = as_router(worker.address)
        yield pool
        if ends_empty:
            await pool.until_empty()
    finally:
        for channel in pool.channels.values():
            await channel.close()
        for worker in pool.workers.values():
            await worker.stop(0)


@asynccontextmanager
async def watched(pool: Pool, name: str) -> AsyncIterator[Any]:
    async with as_router(pool.workers[name].address) as channel:
        call: Any = worker_pb2_grpc.WorkerServiceStub(channel).WatchWorker(worker_pb2.WatchWorkerRequest())
        yield call
        call.cancel()


async def serve_runtime(runtime: WorkerRuntime) -> RunningWorker:
    """Serve a runtime on free ports."""
    credentials = credentials_of(Role.WORKER, runtime.worker_id)
    return await start_worker(runtime, pool_services, credentials, host="127.0.0.1", port=0)


async def messages(call: Any) -> AsyncIterator[Any]:
    """Read the rest of a call (after a `read` it cannot be iterated). Raises KvrelayError."""
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def error_of(call: Any) -> KvrelayError:
    """Read a call to its end and return the error it must end with."""
    try:
        async for _message in messages(call):
            pass
    except KvrelayError as error:
        return error
    raise AssertionError("the call ended without an error")

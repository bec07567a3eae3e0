"""Scripted workers behind real gRPC, and a router in front of them, all in one process."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import xxhash

from common.block_hash import BlockHashes, hash_blocks, hash_probe, hash_root
from common.config import RouterConfig, ServingConfig
from common.errors import KvrelayError, Overloaded, StaleEpoch, from_rpc_error, to_status_bytes
from common.ids import BlockHash, HashRoot, mint_epoch
from common.kv_events import KvEvents, encode_events
from common.parity import TextProbes
from common.rpc import client_channel, error_boundary
from common.rpc_server import Server, start_server
from common.token_batches import runs_of
from common.tokens import tokens_from_bytes
from common.trust.identity import Role
from kvrelay.client.requests import credentials
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_admin_pb2,
    router_admin_pb2_grpc,
    sampling_pb2,
    sequence_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from router.fake_codec import ByteCodec
from router.server import RunningRouter, serve_router
from tests.trust import as_controller_of_router, credentials_of, operator_token, worker_guard

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
BLOCK_SIZE = 4
FINGERPRINT = "fake-model"
VOCAB_SIZE = 256
BLOCK_KEY = bytes.fromhex(credentials_of(Role.ROUTER, "router-0").held.enrolment.block_key)
ROOT = hash_root(model_fingerprint=FINGERPRINT, key=BLOCK_KEY)
TIMEOUT_S = 60.0

Context = grpc.aio.ServicerContext[Any, Any]
Write = Callable[[decode_pb2.DecodeResponse], Awaitable[None]]


def next_token(tokens: Sequence[int], sample_index: int) -> int:
    """The fake model: the next token is a hash of everything before it."""
    return xxhash.xxh3_64_intdigest(bytes(tokens), seed=sample_index) % VOCAB_SIZE


def answer(prompt: Sequence[int], num_tokens: int, sample_index: int = 0) -> list[int]:
    """What one process without a router would answer."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, sample_index))
    return tokens[len(prompt) :]


def hashes_of(sequence: sequence_pb2.SequenceSpec) -> BlockHashes:
    """The hashes that a worker computes from what it was sent."""
    tokens = tokens_from_bytes(sequence.prompt_tokens + sequence.output_tokens)
    return hash_blocks(tokens, root=HashRoot(sequence.hash_root), block_size=BLOCK_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a fake worker says about itself."""

    fingerprint: str = FINGERPRINT
    block_size: int = BLOCK_SIZE
    num_blocks: int = 64
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 200
    model_name: str = "fake"
    probe: bytes = b""
    """Empty: the right one."""
    text: TextProbes = ByteCodec.probes


class Gates:
    """Points at which a fake worker can be made to wait. All are open unless closed."""

    def __init__(self) -> None:
        self._closed: dict[str, asyncio.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}

    def close(self, name: str) -> None:
        self._closed[name] = asyncio.Event()
        self._reached.pop(name, None)

    def open(self, name: str) -> None:
        self._closed[name].set()

    async def reached(self, name: str) -> None:
        """Wait until a worker has come to the gate."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._reached.setdefault(name, asyncio.Event()).wait()

    async def reach(self, name: str) -> None:
        """Called by the worker: pass, or wait until the gate is opened."""
        self._reached.setdefault(name, asyncio.Event()).set()
        if name in self._closed:
            await self._closed[name].wait()


@dataclass(slots=True, eq=False)
class FakeWorker:
    """A worker of one role. Behaves well unless told otherwise."""

    worker_id: str
    role: "worker_pb2.WorkerRole.ValueType"
    shape: Shape = field(default_factory=Shape)
    epoch: int = field(default_factory=mint_epoch)
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0
    gates: Gates = field(default_factory=Gates)
    faults: dict[str, KvrelayError] = field(default_factory=dict)
    """By gate: raised there, once."""
    num_refusals: int = 0
    """Requests to refuse before the first is accepted."""
    retry_after_s: float = 30.0
    """What a refusal says; longer than a test may take."""
    num_duplicates: int = 0
    """Extra copies of each decoded token."""
    num_skipped_steps: int = 0
    """Steps of each decode call that are never sent."""
    requests: list[Any] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    """"started", "finished", "cancelled", "failed"."""
    report: worker_pb2.LoadReport = field(default_factory=worker_pb2.LoadReport)
    timing: worker_pb2.TimingReport | None = None
    blocks: set[BlockHash] = field(default_factory=set)
    num_watches: int = 0
    num_streams: int = 0
    """Shared streams that were opened."""
    server: Server | None = None
    port: int = 0
    watchers: list["asyncio.Queue[tuple[int, KvEvents]]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.report.num_blocks:
            self.report = worker_pb2.LoadReport(num_free_blocks=self.shape.num_blocks, num_blocks=self.shape.num_blocks)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> router_admin_pb2.WorkerEndpoint:
        return router_admin_pb2.WorkerEndpoint(worker_id=self.worker_id, role=self.role, address=self.address)

    @property
    def num_running_calls(self) -> int:
        return self.calls["started"] - self.calls["finished"] - self.calls["cancelled"] - self.calls["failed"]

    async def start(self) -> "FakeWorker":
        servicer = _Servicer(self)  # type: ignore[abstract]

        def add(server: grpc.aio.Server) -> list[str]:
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
            return []

        self.server = await start_server(add, host="127.0.0.1", port=self.port, guard=worker_guard(self.worker_id))
        self.port = self.server.port
        return self

    async def die(self) -> None:
        """Break every call and stop listening."""
        if self.server is not None:
            server, self.server = self.server, None
            await server.grpc_server.stop(None)

    async def restart(self) -> None:
        """Come back on the same port with a new epoch and an empty cache."""
        await self.die()
        self.epoch = mint_epoch()
        self.blocks.clear()
        self.faults.clear()
        await self.start()

    def publish(self, *, stored: Sequence[BlockHash] = (), removed: Sequence[BlockHash] = (), lost: int = 0) -> None:
        """Tell the watchers of changed blocks; `lost` messages before it are never sent."""
        self.blocks |= set(stored)
        self.blocks -= set(removed)
        for watcher in self.watchers:
            watcher.put_nowait((lost, KvEvents(stored=BlockHashes.of(stored), removed=BlockHashes.of(removed))))

    def set_load(self, **fields: int) -> None:
        """Change the reported load."""
        for name, value in fields.items():
            setattr(self.report, name, value)
        self.publish()

    @contextmanager
    def call(self) -> Iterator[None]:
        self.calls["started"] += 1
        try:
            yield
        except asyncio.CancelledError:
            self.calls["cancelled"] += 1
            raise
        except BaseException:
            self.calls["failed"] += 1
            raise
        else:
            self.calls["finished"] += 1

    async def reach(self, gate: str) -> None:
        await self.gates.reach(gate)
        if gate in self.faults:
            raise self.faults.pop(gate)

    def check(self, request: Any) -> None:
        self.requests.append(request)
        if request.epoch != self.epoch:
            raise StaleEpoch(f"epoch is {self.epoch}")
        if self.num_refusals:
            self.num_refusals -= 1
            raise Overloaded("no pages", retry_after_s=self.retry_after_s)


class _Servicer(
    worker_pb2_grpc.WorkerServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._writing = asyncio.Lock()

    async def DescribeWorker(
        self, request: worker_pb2.DescribeWorkerRequest, context: Context
    ) -> worker_pb2.DescribeWorkerResponse:
        worker, shape = self._worker, self._worker.shape
        root = hash_root(model_fingerprint=shape.fingerprint)
        return worker_pb2.DescribeWorkerResponse(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            role=worker.role,
            layout=worker_pb2.KvLayout(block_size=shape.block_size, fingerprint=shape.fingerprint),
            num_blocks=shape.num_blocks,
            max_model_len=shape.max_model_len,
            vocab_size=shape.vocab_size,
            model_name=shape.model_name,
            hash_probe=shape.probe or hash_probe(root, shape.block_size),
            tokenizer_probe=shape.text.tokenizer,
            template_probe=shape.text.template,
            kv_port=worker.port,
            direct_port=worker.port,
        )

    async def WatchWorker(self, request: worker_pb2.WatchWorkerRequest, context: Context) -> None:  # type: ignore[override]
        worker = self._worker
        worker.num_watches += 1
        updates: asyncio.Queue[tuple[int, KvEvents]] = asyncio.Queue()
        updates.put_nowait((0, KvEvents(stored=BlockHashes.of(worker.blocks), is_snapshot=True)))
        worker.watchers.append(updates)
        seq = 0
        try:
            while True:
                lost, events = await updates.get()
                seq += lost
                kv_events = encode_events(events) if events else b""
                update = worker_pb2.WatchWorkerResponse(
                    epoch=worker.epoch, seq=seq, kv_events=kv_events, load=worker.report, timing=worker.timing
                )
                await context.write(update)
                seq += 1
        finally:
            worker.watchers.remove(updates)

    async def GetWorkerStatus(
        self, request: worker_pb2.GetWorkerStatusRequest, context: Context
    ) -> worker_pb2.GetWorkerStatusResponse:
        await self._worker.gates.reach("status")
        status = worker_pb2.WorkerStatus(load=self._worker.report, epoch=self._worker.epoch)
        return worker_pb2.GetWorkerStatusResponse(status=status)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        worker = self._worker
        async with error_boundary(context, "Prefill"):
            with worker.call():
                worker.check(request)
                await worker.reach("prefill")
                started = prefill_pb2.PrefillStarted(
                    num_cached_tokens=worker.num_cached_tokens, num_pulled_tokens=worker.num_pulled_tokens
                )
                await context.write(prefill_pb2.PrefillResponse(started=started))
                await worker.reach("first_token")
                finished = prefill_pb2.PrefillFinished(
                    first_tokens=next(_steps(request.sequence)),
                    prompt_logprobs=_prompt_logprobs(request.sequence),
                    prefill_s=0.25,
                )
                await context.write(prefill_pb2.PrefillResponse(finished=finished))
                await worker.reach("prefill_end")

    async def DecodeMany(  # type: ignore[override]
        self, request_iterator: AsyncIterator[decode_pb2.DecodeManyRequest], context: Context
    ) -> None:
        self._worker.num_streams += 1
        calls: dict[int, asyncio.Task[None]] = {}
        try:
            async for message in request_iterator:
                if message.HasField("open"):
                    calls[message.call_id] = asyncio.create_task(self._decode_one(message, context))
                else:
                    calls[message.call_id].cancel()
        finally:
            for call in calls.values():
                call.cancel()

    async def _decode_one(self, message: decode_pb2.DecodeManyRequest, context: Context) -> None:
        async def write(*responses: decode_pb2.DecodeResponse, end: tuple[int, bytes] | None = None) -> None:
            update = decode_pb2.CallUpdate(call_id=message.call_id, responses=responses)
            if end is not None:
                update.status_code, update.status = end
            async with self._writing:
                await context.write(decode_pb2.DecodeManyResponse(updates=[update]))

        try:
            await self._decode(message.open, write)
        except KvrelayError as error:
            await write(end=to_status_bytes(error))
        else:
            await write(end=(0, b""))

    async def _decode(self, request: decode_pb2.DecodeRequest, write: Write) -> None:
        worker = self._worker
        with worker.call():
            worker.check(request)
            await worker.reach("reserve")
            reserved = decode_pb2.Reserved(num_cached_tokens=worker.num_cached_tokens)
            await write(decode_pb2.DecodeResponse(reserved=reserved))
            steps = _steps(request.sequence)
            if request.HasField("handoff"):
                await worker.reach("fetch")
                next(steps)  # the first tokens came with the manifest
                stats = worker_pb2.TransferStats(num_blocks=2, kv_bytes=100, transfer_s=0.5, exposed_s=0.125)
                await write(decode_pb2.DecodeResponse(transferred=stats))
            else:
                await worker.reach("local_prefill")
                local = decode_pb2.LocalPrefillStarted(
                    num_cached_tokens=worker.num_cached_tokens, num_pulled_tokens=worker.num_pulled_tokens
                )
                await write(decode_pb2.DecodeResponse(prefill_started=local))
            await self._stream(steps, request.sequence, write)

    async def _stream(
        self, steps: Iterator[list[sampling_pb2.SampleToken]], sequence: sequence_pb2.SequenceSpec, write: Write
    ) -> None:
        worker = self._worker
        prompt_logprobs = _prompt_logprobs(sequence)
        for tokens in itertools.islice(steps, worker.num_skipped_steps, None):
            await worker.reach(f"token {tokens[0].token_index}")
            for _ in range(1 + worker.num_duplicates):
                batch = decode_pb2.TokenBatch(prompt_logprobs=prompt_logprobs, prefill_s=0.25)
                if sequence.sampling.detokenize:
                    batch.tokens.extend(tokens)
                else:
                    batch.runs.extend(runs_of(tokens))
                await write(decode_pb2.DecodeResponse(tokens=batch))


def sent_prompt(sequence: sequence_pb2.SequenceSpec) -> list[int]:
    """The prompt that a worker was sent."""
    return list(map(int, np.frombuffer(sequence.prompt_tokens, dtype="<u4")))


def sent_output(sequence: sequence_pb2.SequenceSpec) -> list[int]:
    """The tokens that a worker was told to go on from."""
    return list(map(int, np.frombuffer(sequence.output_tokens, dtype="<u4")))


def _prompt_logprobs(sequence: sequence_pb2.SequenceSpec) -> list[sampling_pb2.PositionLogprobs]:
    if not sequence.sampling.HasField("prompt_logprobs"):
        return []
    chosen = [sampling_pb2.TokenLogprob(token_id=token) for token in sent_prompt(sequence)]
    return [sampling_pb2.PositionLogprobs(chosen=token) for token in chosen]


def _steps(sequence: sequence_pb2.SequenceSpec) -> Iterator[list[sampling_pb2.SampleToken]]:
    """Yield the tokens of each step: one for every sample that has not ended. Token ids of `stop_token_ids` end one."""
    sampling = sequence.sampling
    first = len(sequence.output_tokens) // 4
    tokens = {
        sequence.first_sample_index + i: [*sent_prompt(sequence), *sent_output(sequence)] for i in range(sampling.n)
    }
    for token_index in range(first, sampling.max_tokens):
        step: list[sampling_pb2.SampleToken] = []
        for sample_index in list(tokens):
            token = next_token(tokens[sample_index], sample_index)
            tokens[sample_index].append(token)
            reason = sampling_pb2.FINISH_REASON_UNSPECIFIED
            if token in sampling.stop_token_ids:
                reason = sampling_pb2.FINISH_REASON_STOP
            elif token_index + 1 == sampling.max_tokens:
                reason = sampling_pb2.FINISH_REASON_LENGTH
            step.append(
                sampling_pb2.SampleToken(
                    sample_index=sample_index, token_index=token_index, token_id=token, finish_reason=reason
                )
            )
            if reason:
                del tokens[sample_index]
        yield step
        if not tokens:
            return


@dataclass(slots=True, eq=False)
class Reply:
    """Everything that a client got."""

    messages: list[inference_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def plans(self) -> list[inference_pb2.PlanChosen]:
        return [message.plan for message in self.messages if message.HasField("plan")]

    @property
    def tokens(self) -> list[sampling_pb2.SampleToken]:
        return [token for message in self.messages for token in message.tokens.tokens]

    @property
    def completed(self) -> inference_pb2.Completed:
        """The terminal message, which must be the last and the only one of its kind."""
        assert [i for i, m in enumerate(self.messages) if m.HasField("completed")] == [len(self.messages) - 1]
        return self.messages[-1].completed

    def token_ids(self, sample_index: int = 0) -> list[int]:
        """The tokens of a sample, whose indices must run from 0 without a gap."""
        mine = [token for token in self.tokens if token.sample_index == sample_index]
        assert [token.token_index for token in mine] == list(range(len(mine)))
        return [token.token_id for token in mine]


@dataclass(slots=True, eq=False, kw_only=True)
class TestCluster:
    """A router, its workers and a client."""

    __test__ = False

    router: RunningRouter
    workers: dict[str, FakeWorker]
    channel: grpc.aio.Channel
    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"
    admin: "router_admin_pb2_grpc.RouterAdminServiceAsyncStub"

    async def set_workers(self, *workers: FakeWorker) -> int:
        request = router_admin_pb2.SetWorkersRequest(workers=[worker.endpoint for worker in workers])
        return (await self.admin.SetWorkers(request)).num_ready

    async def status(self) -> inference_pb2.GetClusterStatusResponse:
        request = inference_pb2.GetClusterStatusRequest()
        return await self.inference.GetClusterStatus(request, metadata=credentials(operator_token()))

    async def until_state(self, worker_id: str, state: str) -> inference_pb2.WorkerView:
        """Wait until the router sees a worker in a state that begins with `state`."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                views = {view.worker_id: view for view in (await self.status()).workers}
                if worker_id in views and views[worker_id].state.startswith(state):
                    return views[worker_id]

    async def until_idle(self) -> inference_pb2.RouterStatus:
        """Wait until nothing is held, by the router or by a worker, and return its counters."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                router = (await self.status()).router
                held = router.num_queued + router.num_active + router.num_bookings + router.num_request_tasks
                if not held and not any(worker.num_running_calls for worker in self.workers.values()):
                    return router

    async def until_index_blocks(self, count: int) -> None:
        """Wait until the prefix index knows that many blocks, and the worker's other news."""
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.status()).router.num_index_blocks != count:
                pass

    async def until_queued(self, count: int) -> None:
        """Wait until that many requests wait for a plan."""
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.status()).router.num_queued != count:
                pass

    async def generate(self, request: inference_pb2.GenerateRequest, *, timeout_s: float = TIMEOUT_S) -> Reply:
        """Run a request to its end. Raises KvrelayError."""
        reply = Reply()
        await self.read(self.inference.Generate(request, timeout=timeout_s), reply)
        return reply

    async def read(self, call: Any, reply: Reply) -> None:
        try:
            async for message in call:
                reply.messages.append(message)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@asynccontextmanager
async def running_cluster(
    *workers: FakeWorker, config: RouterConfig | ServingConfig | None = None
) -> AsyncIterator[TestCluster]:
    """Start workers and a router that uses them; all that are started are ready."""
    config = config_with() if config is None else config
    serving = ServingConfig(router=config) if isinstance(config, RouterConfig) else config
    router = await serve_router(
        serving, credentials_of(Role.ROUTER, "router-0"), codec=ByteCodec(), host="127.0.0.1", port=0
    )
    channel, admin_channel = client_channel(router.address), as_controller_of_router(router.admin_address)
    cluster = TestCluster(
        router=router,
        workers={worker.worker_id: worker for worker in workers},
        channel=channel,
        inference=inference_pb2_grpc.InferenceServiceStub(channel),
        admin=router_admin_pb2_grpc.RouterAdminServiceStub(admin_channel),
    )
    try:
        for worker in workers:
            await worker.start()
        await cluster.set_workers(*workers)
        for worker in workers:
            await cluster.until_state(worker.worker_id, "ready")
        yield cluster
    finally:
        await channel.close()
        await admin_channel.close()
        await router.stop(0)
        for worker in workers:
            await worker.die()


def make_request(
    num_prompt_tokens: int = 10, *, max_tokens: int = 6, n: int = 1, stop_token_ids: Sequence[int] = ()
) -> inference_pb2.GenerateRequest:
    """A request for greedy samples of a fixed prompt."""
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, n=n, stop_token_ids=stop_token_ids)
    prompt = inference_pb2.TokenIds(ids=prompt_of(num_prompt_tokens))
    return inference_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)


def timing_of(*, s_per_prompt_token: float) -> worker_pb2.TimingReport:
    """What a worker says that has measured how long its prompts take."""
    return worker_pb2.TimingReport(
        prefill=worker_pb2.StepModel(constant_s=1e-6, per_prefill_token_s=s_per_prompt_token, num_samples=100),
        decode=worker_pb2.StepModel(constant_s=1e-6, num_samples=100),
        max_step_tokens=512,
    )


def prompt_of(num_tokens: int) -> list[int]:
    """A prompt whose blocks all differ."""
    return list(itertools.islice(itertools.cycle(range(1, 252)), num_tokens))


def config_with(**fields: Any) -> RouterConfig:
    """A router configuration for tests: no local plans, short waits, gRPC alone."""
    values = {
        "local_prefill_max_tokens": 0,
        "queue_timeout_s": 5.0,
        "recovery_timeout_s": 5.0,
        "http_port": None,
        **fields,
    }
    return RouterConfig.model_validate(values)

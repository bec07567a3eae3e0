"""A router in front of scripted workers, all in one process over real gRPC."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from common.block_hash import BlockHashes, hash_blocks, hash_root
from common.config import RouterConfig, ServingConfig, SloConfig
from common.errors import KvrelayError, Overloaded, StaleEpoch, from_rpc_error
from common.ids import BlockHash, HashRoot, WorkerId, mint_epoch
from common.kv_events import KvEvents
from common.parity import TextProbes
from common.rpc import client_channel
from common.rpc_server import Server, start_server
from common.tokens import tokens_from_bytes
from common.trust.guard import Guard
from common.trust.identity import Role
from kvrelay.client.requests import credentials
from kvrelay.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    router_admin_pb2,
    router_admin_pb2_grpc,
    sampling_pb2,
    sequence_pb2,
    worker_pb2,
)
from router.codec import ByteCodec
from router.facts import ModelFacts
from router.server import RunningRouter, serve_router
from tests.router.fake_service import HIDDEN_SIZE, VOCAB_SIZE, add_worker_service, next_token
from tests.trust import as_controller_of_router, credentials_of, operator_token, worker_guard

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
BLOCK_SIZE = 4
FINGERPRINT = "fake-model"
BLOCK_KEY = bytes.fromhex(credentials_of(Role.ROUTER, "router-0").held.enrolment.block_key)
ROOT = hash_root(model_fingerprint=FINGERPRINT, key=BLOCK_KEY)
TIMEOUT_S = 60.0
PATIENT_SLO_S = 600.0
"""Objective for the first token by default: no request is late because the machine is busy."""
_PREFILL_GATES = ("prefill", "first_token")


MODEL = ModelFacts(
    name="fake",
    fingerprint=FINGERPRINT,
    block_size=BLOCK_SIZE,
    vocab_size=VOCAB_SIZE,
    max_model_len=1 << 20,
    max_decode_blocks=1 << 20,
    root=ROOT,
)


def answer(prompt: Sequence[int], num_tokens: int, sample_index: int = 0) -> list[int]:
    """Return the answer of one process without a router."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, sample_index))
    return tokens[len(prompt) :]


def sent_prompt(sequence: sequence_pb2.SequenceSpec) -> list[int]:
    """Return the prompt that a worker was sent."""
    return tokens_from_bytes(sequence.prompt_tokens).tolist()


def sent_output(sequence: sequence_pb2.SequenceSpec) -> list[int]:
    """Return the tokens that a worker was told to continue from."""
    return tokens_from_bytes(sequence.output_tokens).tolist()


def hashes_of(sequence: sequence_pb2.SequenceSpec) -> BlockHashes:
    """Return the hashes that a worker computes from what it was sent."""
    tokens = tokens_from_bytes(sequence.prompt_tokens + sequence.output_tokens)
    return hash_blocks(tokens, root=HashRoot(sequence.hash_root), block_size=BLOCK_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Facts that a fake worker reports about itself."""

    fingerprint: str = FINGERPRINT
    block_size: int = BLOCK_SIZE
    num_blocks: int = 64
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 200
    model_name: str = "fake"
    hidden_size: int = HIDDEN_SIZE
    exact_resume: bool = True
    probe: bytes = b""
    """Hash probe; empty: the right one."""
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
        """For the worker: pass, or wait until the gate is open."""
        self._reached.setdefault(name, asyncio.Event()).set()
        if name in self._closed:
            await self._closed[name].wait()


@dataclass(slots=True, eq=False)
class FakeWorker:
    """A scripted worker of one role. Behaves well unless told otherwise."""

    worker_id: str
    role: "worker_pb2.WorkerRole.ValueType"
    shape: Shape = field(default_factory=Shape)
    epoch: int = field(default_factory=mint_epoch)
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0
    gates: Gates = field(default_factory=Gates)
    faults: dict[str, KvrelayError] = field(default_factory=dict)
    """Errors by gate; each is raised there, once."""
    embedding: bytes = b""
    """Answers every request for an embedding, if set."""
    num_refusals: int = 0
    """Requests to refuse before the first is accepted."""
    retry_after_s: float = 30.0
    """Time to retry that a refusal names; longer than a test may take."""
    num_duplicates: int = 0
    """Extra copies of each decoded token."""
    beams: sequence_pb2.BeamState | None = None
    """Sent before the tokens of each decode call."""
    num_skipped_steps: int = 0
    """Steps of each decode call that are never sent."""
    requests: list[Any] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    """"started", "finished", "cancelled", "failed"."""
    report: worker_pb2.LoadReport = field(default_factory=worker_pb2.LoadReport)
    timing: worker_pb2.TimingReport | None = None
    blocks: set[BlockHash] = field(default_factory=set)
    num_watches: int = 0
    poison: list[int] = field(default_factory=list)
    """Prompt that ends the worker, which then comes back."""
    num_crashes: int = 0
    restarting: "asyncio.Task[None] | None" = None
    router: RunningRouter | None = None
    """The router that uses it; set by `running_cluster`."""
    is_overdue: bool = False
    """What it says of its running step."""
    num_streams: int = 0
    """Shared streams that were opened."""
    server: Server | None = None
    guard: Guard | None = None
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
    def prompt_lengths(self) -> list[int]:
        """Lengths of the prompts of all requests, in order of arrival."""
        return [len(sent_prompt(request.sequence)) for request in self.requests]

    @property
    def num_running_calls(self) -> int:
        return self.calls["started"] - self.calls["finished"] - self.calls["cancelled"] - self.calls["failed"]

    async def start(self) -> "FakeWorker":
        add, self.guard = partial(add_worker_service, self), worker_guard(self.worker_id)
        self.server = await start_server(add, host="127.0.0.1", port=self.port, guard=self.guard)
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
        """Send changed blocks to the watchers; `lost` messages before that are never sent."""
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
    def accepting(self, request: Any) -> Iterator[None]:
        """Serve a call inside the block. Raises StaleEpoch or Overloaded when the worker does not accept it."""
        self.calls["started"] += 1
        try:
            self.requests.append(request)
            if request.epoch != self.epoch:
                raise StaleEpoch(f"epoch is {self.epoch}")
            if self.num_refusals:
                self.num_refusals -= 1
                raise Overloaded("no pages", retry_after_s=self.retry_after_s)
            yield
        except asyncio.CancelledError:
            self.calls["cancelled"] += 1
            raise
        except BaseException:
            self.calls["failed"] += 1
            raise
        else:
            self.calls["finished"] += 1

    async def swallow(self, sequence: sequence_pb2.SequenceSpec) -> None:
        """End the worker if the prompt is its poison, once the router knows that it has taken the request."""
        if self.poison and sent_prompt(sequence) == self.poison:
            async with asyncio.timeout(TIMEOUT_S):
                while not self._is_known_to_answer(sequence.request_id):  # noqa: ASYNC110 - no event tells it
                    await asyncio.sleep(0.001)
            self.num_crashes += 1
            self.restarting = asyncio.create_task(self.restart())
            await asyncio.Event().wait()

    def _is_known_to_answer(self, request_id: str) -> bool:
        assert self.router is not None, "a router sent the request"
        holds = self.router.fleet.members_by_id[WorkerId(self.worker_id)].holds
        return any(hold.request_id == request_id and hold.has_answered for hold in holds)

    async def reach(self, gate: str) -> None:
        await self.gates.reach(gate)
        if gate in self.faults:
            raise self.faults.pop(gate)


@dataclass(slots=True, eq=False)
class Reply:
    """All messages that a client got."""

    messages: list[inference_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def plans(self) -> list[inference_pb2.PlanChosen]:
        return [message.plan for message in self.messages if message.HasField("plan")]

    @property
    def tokens(self) -> list[sampling_pb2.SampleToken]:
        return [token for message in self.messages for token in message.tokens.tokens]

    @property
    def completed(self) -> inference_pb2.Completed:
        """The terminal message; checks that it is the last one and the only one."""
        assert [i for i, m in enumerate(self.messages) if m.HasField("completed")] == [len(self.messages) - 1]
        return self.messages[-1].completed

    def token_ids(self, sample_index: int = 0) -> list[int]:
        """Return the tokens of a sample; checks that their indices run from 0 without a gap."""
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

    @property
    def prefill(self) -> FakeWorker:
        """The prefill worker of a `pair`."""
        return self.workers["p0"]

    @property
    def decode(self) -> FakeWorker:
        """The decode worker of a `pair`."""
        return self.workers["d0"]

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

    async def until(self, condition: Callable[[inference_pb2.RouterStatus], object]) -> inference_pb2.RouterStatus:
        """Wait until a condition holds, given the status of the router, and return that status."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(router := (await self.status()).router):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.001)
        return router

    async def until_idle(self) -> inference_pb2.RouterStatus:
        """Wait until neither the router nor a worker holds anything, and return the counters of the router."""

        def is_idle(router: inference_pb2.RouterStatus) -> bool:
            held = router.num_queued + router.num_active + router.num_bookings + router.num_request_tasks
            return not held and not any(worker.num_running_calls for worker in self.workers.values())

        return await self.until(is_idle)

    async def until_index_blocks(self, count: int) -> None:
        """Wait until the prefix index holds that many blocks."""
        await self.until(lambda router: router.num_index_blocks == count)

    async def until_queued(self, count: int) -> None:
        """Wait until that many requests wait for a plan."""
        await self.until(lambda router: router.num_queued == count)

    async def until_held(self, gate: str) -> None:
        """Wait until a `held_pair` holds a request."""
        if gate == "queue":
            await self.until_queued(1)
        else:
            await (self.prefill if gate in _PREFILL_GATES else self.decode).gates.reached(gate)

    async def queue(self, *requests: inference_pb2.GenerateRequest) -> "asyncio.Future[list[Reply]]":
        """Start requests one after the other while no worker has room, and return their replies to come."""
        generating = []
        for position, request in enumerate(requests, 1):
            generating.append(asyncio.create_task(self.generate(request)))
            await self.until_queued(position)
        return asyncio.gather(*generating)

    async def start(
        self, request: inference_pb2.GenerateRequest, worker: FakeWorker, gate: str
    ) -> "asyncio.Task[Reply]":
        """Start a request and return its task once the worker has reached the gate, which must be closed.

        At the gate of a token, all tokens before it have been delivered: some could be lost with a worker that dies.
        """
        reply = Reply()
        generating = asyncio.create_task(self._generate(request, reply, timeout_s=TIMEOUT_S))
        await worker.gates.reached(gate)
        if gate.startswith("token "):
            num_before = int(gate.removeprefix("token "))
            await self.until(lambda _router: len(reply.token_ids()) >= num_before or generating.done())
        return generating

    async def generate(self, request: inference_pb2.GenerateRequest, *, timeout_s: float = TIMEOUT_S) -> Reply:
        """Run a request to its end. Raises KvrelayError."""
        return await self._generate(request, Reply(), timeout_s=timeout_s)

    async def _generate(self, request: inference_pb2.GenerateRequest, reply: Reply, *, timeout_s: float) -> Reply:
        await self.read(self.inference.Generate(request, timeout=timeout_s), reply)
        return reply

    async def embed(
        self, request: inference_pb2.EmbedRequest, *, timeout_s: float = TIMEOUT_S
    ) -> inference_pb2.EmbedResponse:
        """Return an embedding. Raises KvrelayError."""
        try:
            return await self.inference.Embed(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

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
    """Start workers and a router that uses them; all workers are ready inside the block."""
    config = config_with() if config is None else config
    if isinstance(config, RouterConfig):
        serving = ServingConfig(router=config, slo=SloConfig(ttft_s=PATIENT_SLO_S))
    else:
        serving = config
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
            worker.router = router
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


def pair() -> tuple[FakeWorker, FakeWorker]:
    """Return a prefill and a decode worker."""
    return FakeWorker("p0", PREFILL), FakeWorker("d0", DECODE)


def full_pair() -> tuple[FakeWorker, FakeWorker]:
    """Return a prefill worker and a decode worker without free pages, whose `set_load` makes room."""
    prefill, decode = pair()
    decode.report.num_free_blocks, decode.report.num_running = 0, 1
    return prefill, decode


def held_pair(gate: str) -> tuple[FakeWorker, FakeWorker]:
    """Return a pair that holds requests at a gate, or in the queue, as `TestCluster.until_held` sees."""
    prefill, decode = full_pair() if gate == "queue" else pair()
    for worker in (prefill, decode):
        worker.gates.close(gate)
    if gate in _PREFILL_GATES:
        decode.gates.close("fetch")  # there is nothing to fetch yet
    return prefill, decode


def trio() -> tuple[FakeWorker, FakeWorker, FakeWorker]:
    """Return a prefill worker and two decode workers, the second of which is busier."""
    second = FakeWorker("d1", DECODE)
    second.set_load(num_running=9, num_free_blocks=64)
    return *pair(), second


def make_request(
    num_prompt_tokens: int = 10, *, max_tokens: int = 6, n: int = 1, stop_token_ids: Sequence[int] = ()
) -> inference_pb2.GenerateRequest:
    """Return a request for greedy samples of a fixed prompt."""
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, n=n, stop_token_ids=stop_token_ids)
    prompt = inference_pb2.TokenIds(ids=prompt_of(num_prompt_tokens))
    return inference_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)


def timing_of(*, s_per_prompt_token: float) -> worker_pb2.TimingReport:
    """Return the timing report of a worker that has measured its prompts."""
    return worker_pb2.TimingReport(
        prefill=worker_pb2.StepModel(constant_s=1e-6, per_prefill_token_s=s_per_prompt_token, num_samples=100),
        decode=worker_pb2.StepModel(constant_s=1e-6, num_samples=100),
        max_step_tokens=512,
    )


def prompt_of(num_tokens: int) -> list[int]:
    """Return a prompt whose blocks all differ."""
    return list(itertools.islice(itertools.cycle(range(1, 252)), num_tokens))


def config_with(**fields: Any) -> RouterConfig:
    """Return a router configuration for tests: no local plans, gRPC alone."""
    values = {
        "local_prefill_max_tokens": 0,
        "queue_timeout_s": TIMEOUT_S,
        "recovery_timeout_s": TIMEOUT_S,
        "http_port": None,
        **fields,
    }
    return RouterConfig.model_validate(values)

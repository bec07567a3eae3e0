"""A router in front of scripted workers, all in one process over real gRPC."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.config import RouterConfig, ServingConfig, SloConfig
from common.errors import from_rpc_error
from common.ids import WorkerId
from common.rpc import client_channel
from kvrelay.client.requests import credentials
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.router.fake_worker import PREFILL_GATES, FakeWorker
from tests.rpc import answer_of
from tests.served_router import TIMEOUT_S, ServedRouter, serving_router
from tests.trust import operator_token

PATIENT_SLO_S = 600.0
"""Objective for the first token by default: no request is late because the machine is busy."""


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
class TestCluster(ServedRouter):
    """A router, its workers and a client."""

    __test__ = False

    workers: dict[str, FakeWorker]
    channel: grpc.aio.Channel
    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"

    @property
    def prefill(self) -> FakeWorker:
        """The prefill worker of a `pair`."""
        return self.workers["p0"]

    @property
    def decode(self) -> FakeWorker:
        """The decode worker of a `pair`."""
        return self.workers["d0"]

    async def set_workers(self, *workers: FakeWorker) -> int:
        return (await self.use([worker.endpoint for worker in workers])).num_ready

    async def status(self) -> inference_pb2.GetClusterStatusResponse:
        request = inference_pb2.GetClusterStatusRequest()
        return await self.inference.GetClusterStatus(request, metadata=credentials(operator_token()))

    async def view(self, worker_id: str) -> inference_pb2.WorkerView:
        """Return what the router tells of a worker."""
        return next(view for view in (await self.status()).workers if view.worker_id == worker_id)

    async def until_state(self, worker_id: str, state: str) -> None:
        """Wait until the router sees a worker in a state that begins with `state`."""
        members = self.router.fleet.members_by_id

        def is_seen(_router: inference_pb2.RouterStatus) -> bool:
            member = members.get(WorkerId(worker_id))
            return member is not None and member.state_text.startswith(state)

        await self.until(is_seen)

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
            await (self.prefill if gate in PREFILL_GATES else self.decode).gates.reached(gate)

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
        call = self.inference.Generate(request, timeout=timeout_s)
        try:
            await self.read(call, reply)
        finally:
            call.cancel()  # gRPC does not when a reader is cancelled just as the call has been accepted
        return reply

    async def embed(
        self, request: inference_pb2.EmbedRequest, *, timeout_s: float = TIMEOUT_S
    ) -> inference_pb2.EmbedResponse:
        """Return an embedding. Raises KvrelayError."""
        return await answer_of(self.inference.Embed(request, timeout=timeout_s))

    async def ask(self, method: str, request: Any, *, key: str | None = None) -> Any:
        """Call a method of the gRPC door, with a tenant's key if given. Raises KvrelayError."""
        return await answer_of(getattr(self.inference, method)(request, timeout=TIMEOUT_S, metadata=credentials(key)))

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
        config = ServingConfig(router=config, slo=SloConfig(ttft_s=PATIENT_SLO_S))
    try:
        async with serving_router(config) as served, client_channel(served.address) as channel:
            cluster = TestCluster(
                router=served.router,
                admin=served.admin,
                workers={worker.worker_id: worker for worker in workers},
                channel=channel,
                inference=inference_pb2_grpc.InferenceServiceStub(channel),
            )
            for worker in workers:
                worker.router = served.router
                await worker.start()
            await cluster.until_used([worker.endpoint for worker in workers])
            yield cluster
    finally:
        for worker in workers:
            await worker.die()


def make_request(
    num_prompt_tokens: int = 10, *, max_tokens: int = 6, n: int = 1, stop_token_ids: Sequence[int] = ()
) -> inference_pb2.GenerateRequest:
    """Return a request for greedy samples of a fixed prompt."""
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, n=n, stop_token_ids=stop_token_ids)
    prompt = inference_pb2.TokenIds(ids=prompt_of(num_prompt_tokens))
    return inference_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)


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

"""Workers with fake engines in this process, served over real gRPC on free ports."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc

from cluster.worker_process.server import pool_services
from common.config import parse_config
from common.fake_tokenizer import byte_tokenizer
from common.ids import WorkerId
from common.trust.identity import Role
from engine.core import EngineCore
from engine.executor import Executor, ScheduledSequence, StepHandle
from engine.fake import FakeExecutor
from engine.interface import Engine
from kv_tiers.tiers import Tiers
from kvrelay.v1 import decode_pb2_grpc, prefill_pb2_grpc, router_admin_pb2, worker_pb2, worker_pb2_grpc
from tests.builders import BLOCK_SIZE
from tests.clock import ManualClock
from tests.trust import as_router, credentials_of
from tests.worker.calls import Pair
from worker.environment import Environment
from worker.runtime import WorkerRuntime
from worker.serving import RunningWorker, start_worker


async def until_empty(worker: RunningWorker) -> None:
    """Wait (bounded) until a worker holds nothing."""
    runtime = worker.runtime
    async with asyncio.timeout(60):
        while True:
            load = await runtime.engine.call(lambda core: core.load())
            held = load.num_used_blocks + load.num_reserved + load.num_held + load.num_running
            if held + load.num_waiting + runtime.handoffs.num_leases + runtime.num_request_tasks == 0:
                return


def executor_of(worker: RunningWorker) -> Executor:
    """Return what the steps of a worker's own engine run on."""
    return cast("Executor", worker.runtime.executor)


def core_of(engine: Engine) -> EngineCore:
    """Return a worker's engine, which is our own."""
    assert isinstance(engine, EngineCore)
    return engine


class HeldSteps:
    """Holds back the steps of a worker's engine, but those that a test lets go."""

    def __init__(self, worker: RunningWorker) -> None:
        executor = executor_of(worker)
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
    if executor is None:
        executor = FakeExecutor(
            num_blocks=fake.pop("num_blocks", 128),
            block_size=BLOCK_SIZE,
            max_model_len=1024,
            step_s=fake.pop("step_s", 0.0),
        )
        if (window := fake.pop("window", None)) is not None:
            executor.add_window(window)
    environment = environment or Environment.real(credentials_of(Role.WORKER, worker_id))
    if (tiers := fake.pop("tiers", None)) is not None:
        environment = replace(environment, tiers=tiers if isinstance(tiers, Tiers) else Tiers.open(tiers))
    assert not fake, fake
    return WorkerRuntime(
        config=config,
        role=role,
        worker_id=WorkerId(worker_id),
        executor=executor,
        tokenizer=byte_tokenizer(),
        environment=environment,
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

    @property
    def endpoints(self) -> list[router_admin_pb2.WorkerEndpoint]:
        """The workers, as a router is told of them."""
        return [
            router_admin_pb2.WorkerEndpoint(worker_id=name, role=worker.runtime.role, address=worker.address)
            for name, worker in self.workers.items()
        ]

    async def until_empty(self) -> None:
        """Wait (bounded) until no worker holds anything."""
        for worker in self.workers.values():
            await until_empty(worker)


@asynccontextmanager
async def running_pool(
    fakes: dict[str, dict[str, Any]], *, transports: Sequence[str] = ("grpc",), ends_empty: bool = True
) -> AsyncIterator[Pool]:
    """Start workers named p… and d… with these fake engines (`make_runtime`), and stop them with all that they own.

    Waits (bounded) at the end of the block until no worker holds anything; without `ends_empty` it does not.
    """
    pool = Pool({}, {})
    try:
        for name, fake in fakes.items():
            role = worker_pb2.WORKER_ROLE_PREFILL if name.startswith("p") else worker_pb2.WORKER_ROLE_DECODE
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

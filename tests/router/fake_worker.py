"""Scripted workers: what they report, what they are told to do wrong, and the answers of their model."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.block_hash import BlockHashes, hash_blocks, hash_root
from common.errors import KvrelayError, Overloaded, StaleEpoch
from common.ids import BlockHash, HashRoot, WorkerId, mint_epoch
from common.kv_events import KvEvents
from common.parity import TextProbes
from common.rpc_server import Server, start_server
from common.tokens import tokens_from_bytes
from common.trust.guard import Guard
from common.trust.identity import Role
from kvrelay.v1 import router_admin_pb2, sequence_pb2, worker_pb2
from router.fleet.facts import ModelFacts
from router.reading.codec import ByteCodec
from router.server import RunningRouter
from tests.router.fake_service import HIDDEN_SIZE, VOCAB_SIZE, add_worker_service, next_token
from tests.trust import credentials_of, worker_guard

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
BLOCK_SIZE = 4
FINGERPRINT = "fake-model"
BLOCK_KEY = bytes.fromhex(credentials_of(Role.ROUTER, "router-0").held.enrolment.block_key)
ROOT = hash_root(model_fingerprint=FINGERPRINT, key=BLOCK_KEY)
TIMEOUT_S = 60.0
PREFILL_GATES = ("prefill", "first_token")
"""Gates that a prefill worker reaches."""

MODEL = ModelFacts(
    name="fake",
    fingerprint=FINGERPRINT,
    block_size=BLOCK_SIZE,
    vocab_size=VOCAB_SIZE,
    context_length=1 << 20,
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
    compile_s: float = 0.0
    gates: Gates = field(default_factory=Gates)
    faults: dict[str, KvrelayError] = field(default_factory=dict)
    """Errors by gate; each is raised there, once."""
    embedding: bytes = b""
    """Answers every request for an embedding, if set."""
    num_refusals: int = 0
    """Requests to refuse before the first is accepted."""
    retry_after_s: float = 30.0
    """Time to retry that a refusal names; longer than a test may take."""
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
    forgotten: list[bytes] = field(default_factory=list)
    """Roots of the blocks that it was told to forget."""
    is_overdue: bool = False
    """Whether it reports its running step as overdue."""
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
        bookings = self.router.fleet.members_by_id[WorkerId(self.worker_id)].bookings
        return any(booking.request_id == request_id and booking.has_answered for booking in bookings)

    async def reach(self, gate: str) -> None:
        await self.gates.reach(gate)
        if gate in self.faults:
            raise self.faults.pop(gate)


def timing_of(*, s_per_prompt_token: float) -> worker_pb2.TimingReport:
    """Return the timing report of a worker that has measured its prompts."""
    return worker_pb2.TimingReport(
        prefill=worker_pb2.StepModel(constant_s=1e-6, per_prefill_token_s=s_per_prompt_token, num_samples=100),
        decode=worker_pb2.StepModel(constant_s=1e-6, num_samples=100),
        max_step_tokens=512,
    )


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
    if gate in PREFILL_GATES:
        decode.gates.close("fetch")  # there is nothing to fetch yet
    return prefill, decode


def trio() -> tuple[FakeWorker, FakeWorker, FakeWorker]:
    """Return a prefill worker and two decode workers, the second of which is busier."""
    second = FakeWorker("d1", DECODE)
    second.set_load(num_running=9, num_free_blocks=64)
    return *pair(), second

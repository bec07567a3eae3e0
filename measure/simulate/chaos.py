"""A random walk through failures: crashes, and messages that are late, lost or repeated.

The real router and workers run under a virtual clock, over the fake engine, whose tokens depend on every byte of KV
that it reads, and over the simulated network, which carries these bytes. Each answer is compared with that of an
undisturbed engine; after a run nothing may be left anywhere (`measure/simulate/invariants.py`).

    python -m measure.simulate.chaos --requests 100000 --seed 1
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from common.block_hash import hash_blocks
from common.config import PoolConfig, PoolsConfig, RouterConfig, ServingConfig, TransferConfig
from common.errors import KvrelayError
from common.ids import mint_request_id, seeded_ids
from common.lifecycle import LifeCycle
from common.timing import StepModel, TimingModel
from engine.fake import FakeExecutor
from measure.simulate.client import admit
from measure.simulate.invariants import AnswerCheck, Question, QuestionBook, Violation, leftovers
from measure.simulate.loop import VirtualClock, VirtualLoop, collecting_rarely, ending_on_faults
from measure.simulate.network import SimNetwork
from measure.simulate.records import NetworkShape
from measure.simulate.timing import FittedTimes, WorkerSpeed
from measure.simulate.tokens import TokenLog
from measure.simulate.wire import FaultRates, SeededFaults
from measure.simulate.worker import SharedWorld, SimWorker, endpoints, simulated_reach
from router.parts import RouterParts, build_router
from router.record import Job

BLOCK_SIZE = 8
_NUM_BLOCKS = 96
_TIMES = FittedTimes(
    TimingModel(
        prefill=StepModel(constant_s=4e-3, per_prefill_token_s=2e-4),
        decode=StepModel(constant_s=4e-3, per_decode_s=1e-4),
        max_step_tokens=32,
    )
)
_SETTLE_S = 7200.0
"""Virtual time after the last request: longer than any lease, deadline or timeout."""
BAD_DAY = FaultRates(lose=0.0005, repeat=0.0005, delay=0.01, max_delay_s=0.5, stall=0.0001, stall_s=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Load and rates of failures. Equal settings give equal runs."""

    num_requests: int
    seed: int
    num_prefill: int = 2
    num_decode: int = 3
    num_routers: int = 2
    rate_per_s: float = 25.0
    rates: FaultRates = BAD_DAY
    mean_s_between_crashes: float = 15.0
    """Mean time between crashes of any worker."""
    max_down_s: float = 3.0
    cancelled_share: float = 0.03
    """Share of clients that cancel."""
    timeout_s: float = 600.0


@dataclass(slots=True)
class ChaosReport:
    """Events of a run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests by outcome: "complete", "cancelled", or an error class."""
    num_crashes: int = 0
    num_messages_lost: int = 0
    num_messages_repeated: int = 0
    num_messages_late: int = 0
    num_stalls: int = 0
    num_replans: int = 0
    virtual_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    """Broken invariants; empty in a correct run."""


def run_chaos(settings: ChaosSettings, *, progress: Callable[[int], None] | None = None) -> ChaosReport:
    """Run the walk. Blocks; needs a thread without a running loop. Raises the errors of bugs."""
    with collecting_rarely(), seeded_ids(settings.seed), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_walk(settings, progress))


async def _walk(settings: ChaosSettings, progress: Callable[[int], None] | None) -> ChaosReport:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    with ending_on_faults(loop):
        walk = _Walk(loop, settings)
        await walk.start()
        await walk.serve_all(progress)
        return await walk.finish()


class _Walk:
    """A cluster and its failures. Event loop only."""

    def __init__(self, loop: VirtualLoop, settings: ChaosSettings) -> None:
        self._loop = loop
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._faults = SeededFaults(settings.rates, seed=self._random.getrandbits(32), now_s=loop.time)
        self._faults.is_quiet = True
        self._network = SimNetwork(loop, NetworkShape(kv_bytes_per_s=1e6), block_bytes=0, faults=self._faults)
        self._surroundings = SharedWorld(
            loop=loop, network=self._network, config=_config(), log=TokenLog(), report_interval_s=0.05
        )
        self._endpoints = endpoints(settings.num_prefill, settings.num_decode)
        self._workers = [self._worker(i) for i in range(len(self._endpoints))]
        self._is_down = [False] * len(self._workers)
        self._routers = [
            build_router(
                _config().router,
                clock=VirtualClock(loop),
                reach=simulated_reach(self._network.connect_from(f"router-{number}:1")),
            )
            for number in range(settings.num_routers)
        ]
        self._book = QuestionBook(self._random, block_size=BLOCK_SIZE)
        self._report = ChaosReport()

    async def start(self) -> None:
        """Start workers and routers."""
        for worker in self._workers:
            worker.start()
        for router in self._routers:
            router.fleet.set_workers(self._endpoints)
        await asyncio.sleep(10.0)

    async def serve_all(self, progress: Callable[[int], None] | None) -> None:
        """Send all requests, crash workers meanwhile, and wait for the last reply."""
        self._faults.is_quiet = False
        crashing = self._loop.create_task(self._crash_forever())
        running: dict[asyncio.Task[None], None] = {}
        num_ended = 0

        def ended(task: "asyncio.Task[None]") -> None:
            nonlocal num_ended
            del running[task]
            task.result()
            num_ended += 1
            if progress is not None:
                progress(num_ended)

        for number in range(self._settings.num_requests):
            await asyncio.sleep(self._random.expovariate(self._settings.rate_per_s))
            router = self._routers[number % len(self._routers)]
            task = self._loop.create_task(self._client(self._book.draw(), router))
            running[task] = None
            task.add_done_callback(ended)
        while running:
            await asyncio.wait(running)
        crashing.cancel()
        await asyncio.wait([crashing])

    async def finish(self) -> ChaosReport:
        """Wait until everything settles, then close the cluster and report what is left."""
        report, faults = self._report, self._faults
        report.virtual_s = self._loop.time()
        faults.is_quiet = True
        for number, is_down in enumerate(self._is_down):
            if is_down:
                self._restart(number)
        await asyncio.sleep(_SETTLE_S)
        report.num_messages_lost, report.num_messages_repeated = faults.num_lost, faults.num_repeated
        report.num_messages_late, report.num_stalls = faults.num_late, faults.num_stalls
        report.num_replans = sum(router.orchestrator.totals.num_replans for router in self._routers)
        report.violations += leftovers(self._workers, self._routers)
        # A router keeps up to two streams to each worker: updates, and decode calls.
        num_streams = 2 * len(self._routers) * len(self._workers)
        if self._network.num_calls > num_streams:
            report.violations.append(f"{self._network.num_calls} calls are left; idle streams are {num_streams}")
        for router in self._routers:
            await router.fleet.aclose()
        for worker in self._workers:
            await worker.aclose()
        await asyncio.sleep(_SETTLE_S)
        if self._network.num_calls:
            report.violations.append(f"{self._network.num_calls} calls are left after the shutdown")
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            report.violations.append(f"{len(others)} tasks are left after the shutdown")
        return report

    async def _client(self, question: Question, router: RouterParts) -> None:
        """Ask one question; some clients cancel."""
        patience_s = None
        if self._random.random() < self._settings.cancelled_share:
            patience_s = self._random.expovariate(2.0)
        try:
            async with asyncio.timeout(patience_s):
                outcome = await self._ask(question, router)
        except TimeoutError:
            outcome = "cancelled"
        self._report.outcomes[outcome] += 1

    async def _ask(self, question: Question, router: RouterParts) -> str:
        """Return the outcome of a request; note a broken invariant."""
        life = LifeCycle(mint_request_id(), router.clock)
        ends_s = self._loop.time() + self._settings.timeout_s
        check = AnswerCheck(question)
        try:
            with (
                router.orchestrator.account(life, time_left_s=lambda: ends_s - self._loop.time()),
                admit(router) as ticket,
            ):
                model = await router.fleet.wait_for_model(timeout_s=self._settings.timeout_s)
                job = Job(
                    request_id=life.request_id,
                    prompt_token_ids=question.prompt,
                    prompt_hashes=hash_blocks(question.prompt, root=model.root, block_size=model.block_size),
                    sampling=question.sampling,
                    model=model,
                )
                running = router.orchestrator.running(job, ticket, life, timeout_s=ends_s - self._loop.time())
                async with running as outbox:
                    while (message := await outbox.get()) is not None:
                        check.take(message)
                if outbox.error is not None:
                    raise outbox.error
            check.end_well()
        except KvrelayError as error:
            check.end_badly()
            return type(error).__name__
        except Violation as violation:
            self._report.violations.append(f"{life.request_id}: {violation}")
            return "wrong"
        return "complete"

    # Crashes.

    async def _crash_forever(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._settings.mean_s_between_crashes))
            number = self._random.randrange(len(self._workers))
            down_s = self._random.uniform(0.0, self._settings.max_down_s)
            if not self._is_down[number]:
                self._is_down[number] = True
                self._report.num_crashes += 1
                await self._workers[number].crash()
                self._loop.call_later(down_s, self._restart, number)

    def _restart(self, number: int) -> None:
        if self._is_down[number]:
            self._is_down[number] = False
            self._workers[number] = self._worker(number)
            self._workers[number].start()

    def _worker(self, number: int) -> SimWorker:
        executor = FakeExecutor(num_blocks=_NUM_BLOCKS, block_size=BLOCK_SIZE, max_steps_in_flight=1 + number % 2)
        return SimWorker(self._endpoints[number], self._surroundings, executor, WorkerSpeed(times=_TIMES))


def _config() -> ServingConfig:
    pool = PoolConfig(
        block_size=BLOCK_SIZE, num_blocks=_NUM_BLOCKS, max_step_tokens=32, max_running=12, max_waiting=32, metrics=False
    )
    return ServingConfig(
        pools=PoolsConfig(prefill=pool, decode=pool),
        transfer=TransferConfig(transports=("grpc",), chunk_bytes=4096, lease_ttl_s=4.0),
        router=RouterConfig(metrics_port=None),
    )


def main() -> int:
    """Run the walk of the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m measure.simulate.chaos", description="Crashes and message faults in a simulated cluster."
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    started_s = time.perf_counter()

    def progress(num_ended: int) -> None:
        if num_ended % 1000 == 0:
            print(f"{num_ended} of {args.requests}, {time.perf_counter() - started_s:.0f} s", file=sys.stderr)  # noqa: T201

    report = run_chaos(ChaosSettings(num_requests=args.requests, seed=args.seed), progress=progress)
    for name in (entry.name for entry in fields(report) if entry.name != "violations"):
        print(f"{name}: {getattr(report, name)}")  # noqa: T201
    for violation in report.violations:
        print(f"VIOLATION {violation}")  # noqa: T201
    print(f"{len(report.violations)} violations")  # noqa: T201
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs a workload on a whole cluster in one process, under a virtual clock.

The router (fleet, index, policy, admission, orchestration), the workers' services, the engines' bookkeeping and the
transfer protocol are the real ones. The network (`network.py`), the passing of time in engines (`engine.py`) and the
model's answers (`executor.py`) are simulated. Requests enter behind the router's front door, already tokenized.

Everything happens on one virtual loop, ids are minted from the seed, and time begins at the first arrival: a run is a
function of shape, settings and arrivals.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from cluster.planner.plan import PoolSizes
from common.config import PoolConfig, PoolsConfig, ServingConfig, TransferConfig
from common.errors import Refused, WorkerLost
from common.ids import RequestId, seeded_ids
from common.signals import uninterrupted
from engine.pages.window_pages import num_pages_beside
from kvrelay.v1 import worker_pb2
from measure.load.records import PoolSample, RequestRecord, WorkerSample
from measure.simulate.client import Crowd, Progress, SimClient
from measure.simulate.executor import KnownAnswer, SimExecutor, sim_shape
from measure.simulate.loop import VirtualClock, VirtualLoop, collecting_rarely, ending_on_faults
from measure.simulate.network import SimNetwork
from measure.simulate.planning import PlanningLoop
from measure.simulate.pools import SimPools
from measure.simulate.records import Arrival, ClusterShape, SimRun, SimSettings, WorkerResult
from measure.simulate.tokens import TokenLog
from measure.simulate.wire import PageBytes
from measure.simulate.worker import POOLS, SharedWorld, SimWorker, simulated_reach
from router.choosing.chooser import Search
from router.fleet.booking import Booking
from router.fleet.facts import WorkerEndpoint
from router.parts import RouterParts, build_router

_WARM_UP_S = 10.0
"""Time before the first arrival, in which routers meet the workers. Subtracted from all reported times."""
_WATCH = "/kvrelay.v1.WorkerService/WatchWorker"
_Choose = Callable[[Search], Booking | Refused]


def run(
    shape: ClusterShape, settings: SimSettings, arrivals: Iterable[Arrival], *, progress: Progress | None = None
) -> SimRun:
    """Serve a workload to its end and return its record. Blocks; needs a thread without a running loop.

    Raises the errors of bugs in any part.
    """
    started_s = time.perf_counter()
    with collecting_rarely(), seeded_ids(settings.seed), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        try:
            finished = runner.run(_serve_all(shape, settings, arrivals, progress))
        except KeyboardInterrupt:
            with uninterrupted():  # a second one would break off the ends of its tasks, each with a traceback
                runner.close()
            raise
    finished.wall_s = time.perf_counter() - started_s
    return finished


async def _serve_all(
    shape: ClusterShape, settings: SimSettings, arrivals: Iterable[Arrival], progress: Progress | None
) -> SimRun:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    cluster = SimCluster(loop, shape, settings)
    with ending_on_faults(loop):
        await cluster.start()
        requests = await cluster.serve_all(arrivals, progress)
        finished = cluster.finished(requests)
        await cluster.aclose()
    return finished


class SimCluster:
    """Routers and workers on one virtual loop. Event loop only."""

    def __init__(self, loop: VirtualLoop, shape: ClusterShape, settings: SimSettings) -> None:
        self.shape = shape
        self.settings = settings
        self.log = TokenLog()
        self._kv_shape = sim_shape(block_size=shape.block_size, block_bytes=shape.block_bytes, windows=shape.windows)
        self.network = SimNetwork(
            loop,
            settings.network,
            pages=PageBytes(
                block=shape.block_bytes, window=self._kv_shape.window_page_bytes, num_blocks=shape.num_blocks
            ),
            extra_latency_s={_WATCH: settings.event_lag_s},
        )
        self.choice_s: list[float] = []
        self._loop = loop
        self._answers: dict[RequestId, KnownAnswer] = {}
        self._surroundings = SharedWorld(
            loop=loop,
            network=self.network,
            config=_config(shape, settings),
            log=self.log,
            report_interval_s=settings.report_interval_s,
        )
        self.routers = [self._router(number) for number in range(shape.num_routers)]
        self.pools = SimPools(loop, self._worker, self.routers)
        self.clients = [SimClient(router, loop, settings, self._answers, self.log) for router in self.routers]
        self.samples: tuple[PoolSample, ...] = ()
        self._begin_s = 0.0

    async def start(self) -> None:
        """Start workers and routers and wait until the routers know the workers."""
        self.pools.open(PoolSizes(prefill=self.shape.num_prefill, decode=self.shape.num_decode))
        await asyncio.sleep(_WARM_UP_S)
        for router in self.routers:
            num_ready = router.fleet.count_ready()
            if num_ready != self.shape.num_workers:
                raise WorkerLost(
                    f"{num_ready} of {self.shape.num_workers} simulated workers are ready after {_WARM_UP_S:g} s: lower"
                    " the network's latency"
                )
        self._begin_s = self.pools.begin_s = self._loop.time()
        for client in self.clients:
            client.begin_s = self._begin_s

    async def serve_all(
        self, arrivals: Iterable[Arrival], progress: Progress | None = None
    ) -> tuple[RequestRecord, ...]:
        """Serve a workload; returns its requests when the last one, those that follow from others included, has ended.

        With a planner no samples are taken: they would be of the initial workers only.
        """
        crowd = Crowd(self._loop, self.clients, begin_s=self._begin_s, progress=progress)
        if self.settings.elasticity is not None:
            planning = PlanningLoop(self._loop, self.pools, self.routers, self.settings.elasticity)
            planning.start()
            requests = await crowd.serve(arrivals)
            await planning.stop()
            return requests
        sampler = LoadSampler(self._loop, self.pools.workers, self.routers, self.settings.sample_interval_s)
        sampler.start()
        requests = await crowd.serve(arrivals)
        self.samples = sampler.stop()
        return requests

    def finished(self, requests: tuple[RequestRecord, ...]) -> SimRun:
        """Return the record of the run."""
        return SimRun(
            requests=requests,
            workers=[_worker_result(worker) for worker in self.pools.workers],
            samples=self.samples,
            stays=self.pools.stays,
            num_moves=sum(router.orchestrator.calls.totals.num_moves for router in self.routers),
            end_s=self._loop.time() - self._begin_s,
            wall_s=0.0,
            choice_s=self.choice_s,
        )

    async def aclose(self) -> None:
        """Close routers and workers."""
        for router in self.routers:
            await router.fleet.aclose()
        await self.pools.aclose()

    def _worker(self, endpoint: WorkerEndpoint) -> SimWorker:
        shape, settings = self.shape, self.settings
        executor = SimExecutor(
            shape=self._kv_shape,
            num_blocks=shape.num_blocks,
            num_window_pages=num_pages_beside(shape.num_blocks, self._kv_shape, shape.max_step_tokens),
            max_model_len=shape.max_model_len,
            answers=self._answers,
        )
        pace = settings.prefill if endpoint.role == worker_pb2.WORKER_ROLE_PREFILL else settings.decode
        return SimWorker(endpoint, self._surroundings, executor, pace, tiers=shape.tiers)

    def _router(self, number: int) -> RouterParts:
        router = build_router(
            self.settings.router.model_copy(update={"silence_s": None}),  # nothing stops here, and heartbeats cost time
            clock=VirtualClock(self._loop),
            reach=simulated_reach(self.network.connect_from(f"router-{number}:1")),
            substitutes=self.settings.substitutes,
        )
        router.chooser.choose = _timed(router.chooser.choose, self.choice_s)  # type: ignore[method-assign, assignment]
        return router


def _config(shape: ClusterShape, settings: SimSettings) -> ServingConfig:
    pool = PoolConfig(
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        max_step_tokens=shape.max_step_tokens,
        max_running=shape.max_running,
        max_waiting=shape.max_waiting,
        metrics=False,
    )
    decode_pool = pool.model_copy(update={"max_step_tokens": shape.decode_step_tokens or shape.max_step_tokens})
    return ServingConfig(
        pools=PoolsConfig(prefill=pool, decode=decode_pool),
        transfer=TransferConfig(transports=("cuda_ipc", "grpc")),
        router=settings.router,
    )


def _timed(choose: _Choose, seconds: list[float]) -> _Choose:
    """Return `choose`, extended to note the real time that it takes."""

    def timed(search: Search) -> Booking | Refused:
        started_s = time.perf_counter()
        try:
            return choose(search)
        finally:
            seconds.append(time.perf_counter() - started_s)

    return timed


def _worker_result(worker: SimWorker) -> WorkerResult:
    runtime, engine = worker.runtime, worker.engine
    load = engine.core.load()
    return WorkerResult(
        worker_id=worker.endpoint.worker_id,
        num_steps=engine.num_steps,
        busy_s=engine.busy_s,
        num_cached_tokens=load.num_cached_tokens,
        num_computed_tokens=load.num_computed_tokens,
        num_preemptions=load.num_preemptions,
        num_requests=runtime.calls.num_requests,
        kv_bytes_sent=runtime.bytes_sent.total(),
        kv_bytes_received=runtime.bytes_received.total(),
    )


class LoadSampler:
    """Notes every worker's load at equal intervals. Changes nothing. Event loop only."""

    def __init__(
        self, loop: VirtualLoop, workers: Sequence[SimWorker], routers: Sequence[RouterParts], interval_s: float | None
    ) -> None:
        """`interval_s`: None takes no samples."""
        self._loop = loop
        self._workers = workers
        self._routers = routers
        self._interval_s = interval_s
        self._begin_s = 0.0
        self._samples: list[PoolSample] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take a sample now and after every interval."""
        self._begin_s = self._loop.time()
        if self._interval_s is not None:
            self._take(self._interval_s)

    def stop(self) -> tuple[PoolSample, ...]:
        """Stop and return the samples, with times since the start."""
        if self._timer is not None:
            self._timer.cancel()
        return tuple(self._samples)

    def _take(self, interval_s: float) -> None:
        self._samples.append(
            PoolSample(
                at_s=self._loop.time() - self._begin_s,
                num_queued=sum(router.line.num_queued for router in self._routers),
                workers=tuple(map(_worker_sample, self._workers)),
            )
        )
        self._timer = self._loop.call_later(interval_s, self._take, interval_s)


def _worker_sample(worker: SimWorker) -> WorkerSample:
    load = worker.engine.core.load()
    return WorkerSample(
        worker_id=worker.endpoint.worker_id,
        role=POOLS[worker.endpoint.role],
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_blocks=load.num_blocks,
        num_used_blocks=load.num_used_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_computed_tokens=load.num_computed_tokens,
        num_cached_tokens=load.num_cached_tokens,
        busy_s=worker.engine.busy_s,
    )

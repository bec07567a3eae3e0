"""A simulated worker process: the real runtime and services on a simulated engine and network."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import grpc

from cluster.planner.plan import Pool
from cluster.worker_process.server import pool_services
from common.clock import Clock
from common.config import ServingConfig
from common.fake_tokenizer import byte_tokenizer
from common.ids import WorkerId
from common.rpc import Connect
from common.timing import TimingModel
from common.trust.channels import Reach
from engine.core import EngineCore
from engine.events import StepSample
from engine.executor import Executor
from engine.thread import EngineDriver, EngineSetup
from kv_tiers.tiers import Tiers
from kvrelay.v1 import kv_transfer_pb2, worker_pb2
from measure.simulate.engine import SimEngine
from measure.simulate.loop import VirtualClock, VirtualLoop
from measure.simulate.network import SimNetwork, SimServer
from measure.simulate.records import TierShape
from measure.simulate.tiers import SimTierBlocks, SimWorkerTiers
from measure.simulate.timing import WorkerSpeed
from measure.simulate.tokens import TokenLog
from router.fleet.facts import WorkerEndpoint
from worker.environment import Environment
from worker.runtime import ServedPorts, WorkerRuntime
from worker.serving import common_services
from worker.timing import WorkerTiming
from worker.worker_tiers import WorkerTiers

ROLES = {Pool.PREFILL: worker_pb2.WORKER_ROLE_PREFILL, Pool.DECODE: worker_pb2.WORKER_ROLE_DECODE}
POOLS = {role: pool for pool, role in ROLES.items()}
_PORT = 1
_NO_TIME_S = 1e-9
"""Time in which all ready callbacks run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWorld:
    """Everything that simulated workers share."""

    loop: VirtualLoop
    network: SimNetwork
    config: ServingConfig
    log: TokenLog
    report_interval_s: float


class _GivenTiming(WorkerTiming):
    """A timing model that is given, not fitted."""

    def __init__(self, model: TimingModel, clock: Clock) -> None:
        super().__init__(max_step_tokens=model.max_step_tokens, clock=clock)
        self.model = model

    def change_budget(self, max_step_tokens: int) -> None:
        """Limit the tokens of a step from now on."""
        self.model = replace(self.model, max_step_tokens=max_step_tokens)

    def observe(self, samples: Iterable[StepSample]) -> None:
        """Learn nothing."""

    def observe_pull(self, peer: WorkerId, transport: int, num_bytes: int, seconds: float) -> None:
        """Learn nothing."""

    def observe_tier_read(self, num_bytes: int, seconds: float) -> None:
        """Learn: a model that is given tells nothing of tiers."""
        if self._tier_read.add(num_bytes, seconds, now_s=self._clock.monotonic()):
            self.model = replace(self.model, tier_read=self._tier_read.model)
            self.version += 1


class _SimRuntime(WorkerRuntime):
    """A runtime whose simulated tiers take virtual time."""

    def _with_tiers(self, tiers: Tiers) -> WorkerTiers:
        if not isinstance(tiers, SimTierBlocks):
            return super()._with_tiers(tiers)
        lives = self.engine.core.report_published()
        assert lives is not None, "models with windows have no tiers"
        return SimWorkerTiers(
            tiers,
            store=self.executor.kv,
            lives=lives,
            clock=self.clock,
            on_changes=self.hub.publish,
            gate=self._read_gate(),
        )


class SimWorker:
    """One life of a worker process. Event loop only."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        surroundings: SharedWorld,
        executor: Executor,
        pace: WorkerSpeed,
        *,
        tiers: Sequence[TierShape] | Tiers = (),
        make_engine: Callable[..., SimEngine] = SimEngine,
    ) -> None:
        """`tiers`: shapes of simulated ones, which move no bytes, or real ones, whose reads take no time."""
        self.endpoint = endpoint
        self._make_engine = make_engine
        self._surroundings = surroundings
        self._times = pace.times
        self._tiers = tiers if isinstance(tiers, Tiers) else cast("Tiers", SimTierBlocks(tiers)) if tiers else None
        self.runtime = _SimRuntime(
            config=surroundings.config,
            role=endpoint.role,
            worker_id=endpoint.worker_id,
            executor=executor,
            tokenizer=byte_tokenizer(),
            environment=self._outside(),
        )
        self.runtime.ports = ServedPorts(kv=_PORT, direct=_PORT)
        if pace.timing is not None:
            self.runtime.timing = _GivenTiming(pace.timing, self.runtime.clock)

    @property
    def engine(self) -> SimEngine:
        """The simulated engine."""
        engine = self.runtime.engine
        assert isinstance(engine, SimEngine)
        return engine

    def start(self) -> None:
        """Start serving."""
        runtime, server = self.runtime, SimServer()
        grpc_server = cast("grpc.aio.Server", server)
        for service in (
            *common_services(runtime, update_gap_s=self._surroundings.report_interval_s),
            *pool_services(runtime),
        ):
            service.add(grpc_server)
        runtime.start()
        self._surroundings.network.listen(self.endpoint.address, server)

    async def change_role(self, role: worker_pb2.WorkerRole.ValueType, *, grace_s: float) -> None:
        """Move to the other pool as `WorkerRuntime.change_role` does. The caller notifies the routers."""
        await self.runtime.change_role(role, epoch=self.runtime.epoch, grace_s=grace_s)
        self.endpoint = replace(self.endpoint, role=role)

    async def crash(self) -> None:
        """Die without notice. Tokens that were only held back for bundling go out first, unless it is stopped."""
        loop, worker_id = self._surroundings.loop, self.endpoint.worker_id
        self.engine.stop()
        if not loop.is_stopped(worker_id):
            await asyncio.sleep(_NO_TIME_S)
        self._surroundings.network.crash(self.endpoint.address)
        loop.continue_process(worker_id)  # its tasks can only end when they run
        await self.runtime.aclose()

    async def aclose(self) -> None:
        """Close the worker in an orderly way."""
        self.runtime.hub.close()
        await self.runtime.aclose()

    def _outside(self) -> Environment:
        around = self._surroundings
        return Environment(
            clock=VirtualClock(around.loop),
            connect=around.network.connect_from(self.endpoint.address),
            drive=self._drive,
            check_pull=allow_any,
            tiers=self._tiers,
        )

    def _drive(self, executor: Executor, setup: EngineSetup) -> EngineDriver:
        around = self._surroundings
        core = EngineCore(executor, setup.limits, setup.clock)
        return self._make_engine(core, setup.on_report, loop=around.loop, times=self._times, log=around.log)


def allow_any(_source: WorkerId, _opened: kv_transfer_pb2.OpenFetch) -> None:
    """Allow every pull: the simulated network has no strangers."""


def simulated_reach(connect: Connect) -> Reach:
    """Return a reach that makes channels by `connect`. Its tickets are blank: simulated workers check none."""
    return Reach(worker=connect, router=connect, issue=lambda _right: "")


def pool_endpoint(pool: Pool, number: int) -> WorkerEndpoint:
    """Return the endpoint of a worker of a pool: "prefill-0" at prefill-0:1."""
    name = f"{pool}-{number}"
    return WorkerEndpoint(worker_id=WorkerId(name), role=ROLES[pool], address=f"{name}:{_PORT}")


def endpoints(num_prefill: int, num_decode: int) -> list[WorkerEndpoint]:
    """Return the endpoints of a cluster."""
    return [
        pool_endpoint(pool, number)
        for pool, count in ((Pool.PREFILL, num_prefill), (Pool.DECODE, num_decode))
        for number in range(count)
    ]

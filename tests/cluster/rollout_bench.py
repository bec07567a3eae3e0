"""A cluster of fake workers for tests of rollouts."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from cluster.changes.rollout import RolloutHooks, Rollouts, RolloutTerms
from cluster.changes.scaling import Scaler
from cluster.processes.launcher import StartFailed
from cluster.processes.life import Life
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import HostResources, ProcessRole, ProcessSpec, make_plan, pool_order
from cluster.processes.state import ClusterPhase
from cluster.processes.worker_calls import WorkerSnapshot
from cluster.processes.workforce import Workforce
from common.config import ServingConfig
from common.errors import InvalidRequest, KvrelayError
from common.timing import StepModel, TimingModel
from tests.cluster.support import make_config

DECODE, PREFILL, ROUTER = ProcessRole.DECODE, ProcessRole.PREFILL, ProcessRole.ROUTER
TERMS = RolloutTerms(canary_s=2.0, max_slowdown=1.5, grace_s=9.0)
HOST = HostResources(cores=12, gpus=None, memory_bytes=6 << 30)


def snapshot(step_s: float = 0.01) -> WorkerSnapshot:
    model = StepModel(constant_s=step_s, num_samples=20)
    timing = TimingModel(prefill=model, decode=model, max_step_tokens=512)
    return WorkerSnapshot(busy_s=1.0, num_decodes=2, num_context_tokens=100, timing=timing)


def process(spec: ProcessSpec) -> Any:
    """Return a process that serves."""
    return SimpleNamespace(spec=spec, address=spec.name, life=Life(num_lives=1))


@dataclass
class FakeWorkforce(Workforce):
    """Processes that are only names; records every step, and the pools' sizes after it."""

    pool: list[Any] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    sizes: list[Mapping[ProcessRole, int]] = field(default_factory=list)
    fails: Callable[[ProcessSpec], bool] = lambda spec: False
    failures: dict[str, KvrelayError] = field(default_factory=dict)
    """Errors of flips by the worker's name; such a worker keeps three requests when it drains."""
    blocked: set[str] = field(default_factory=set)
    """Steps, such as `+decode-1` or `drain decode-0`, that last until they are cancelled."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a blocked step has begun."""
    phase: ClusterPhase = ClusterPhase.READY

    def workers(self, role: ProcessRole) -> list[ManagedProcess]:
        pool = [cast(ManagedProcess, each) for each in self.pool if each.spec.role is role]
        return sorted(pool, key=lambda worker: pool_order(worker.spec))

    async def add_worker(self, spec: ProcessSpec, report: Callable[[str], None] = print) -> int:
        if self.fails(spec):
            raise StartFailed(f"{spec.name}: exited with code 1")
        await self._step(f"+{spec.name}")
        self.pool.append(process(spec))
        self._note(f"+{spec.name}")
        return 0

    async def drain_router(self, process: ManagedProcess, *, grace_s: float) -> None:
        self.done.append(f"drain {process.spec.name}")

    async def drain_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        self.done.append(f"drain {process.spec.name}")
        await self._step(f"drain {process.spec.name}")
        return 3 if process.spec.name in self.failures else 0

    def keep_worker(self, process: ManagedProcess) -> None:
        self.done.append(f"keep {process.spec.name}")

    async def flip_worker(self, process: ManagedProcess, role: ProcessRole, *, grace_s: float) -> None:
        if (failure := self.failures.get(process.spec.name)) is not None:
            raise failure
        process.spec = replace(process.spec, role=role)
        self._note(f"{process.spec.name} to {role}")

    async def evacuate_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        return 0

    async def remove_worker(self, process: ManagedProcess) -> None:
        self.pool.remove(process)
        self._note(f"-{process.spec.name}")

    async def _step(self, what: str) -> None:
        if what in self.blocked:
            self.begun.set()
            await asyncio.Event().wait()

    def named(self, name: str) -> Any:
        return next(each for each in self.pool if each.spec.name == name)

    def configs(self) -> dict[str, ServingConfig | None]:
        """Return the own configuration of each worker."""
        return {each.spec.name: each.spec.config for each in self.pool if each.spec.role is not ROUTER}

    def _note(self, what: str) -> None:
        self.done.append(what)
        self.sizes.append({role: len(self.workers(role)) for role in (PREFILL, DECODE)})


@dataclass
class Bench:
    """A cluster of fake processes with the configuration `before`."""

    before: ServingConfig
    workforce: FakeWorkforce = field(default_factory=FakeWorkforce)
    kept: list[ServingConfig] = field(default_factory=list)
    snapshots: dict[str, WorkerSnapshot] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)
    slept_s: float = 0.0
    least_decode: int = 0
    while_asleep: Callable[[], None] = lambda: None
    while_kept: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        for spec in make_plan(self.before, HOST):
            self.workforce.pool.append(process(spec))
        self.scaler = Scaler(self.before, self.workforce, partial(make_plan, host=HOST))
        hooks = RolloutHooks(keep=self._keep, check=self._check, inspect=self._inspect, sleep=self._sleep)
        self.rollouts = Rollouts(self.scaler, self.workforce, hooks)

    async def run(self, after: ServingConfig, terms: RolloutTerms = TERMS) -> None:
        await self.rollouts.run(after, terms, report=self.reports.append)

    def _keep(self, config: ServingConfig) -> None:
        self.kept.append(config)
        self.while_kept()

    async def _inspect(self, address: str) -> WorkerSnapshot | None:
        return self.snapshots.get(address, snapshot())

    async def _check(self, sizes: Mapping[ProcessRole, int]) -> None:
        if sizes[DECODE] < self.least_decode:
            raise InvalidRequest("the load needs more", field="decode")

    async def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.while_asleep()


def pools(prefill: int = 1, decode: int = 2, **decode_keys: Any) -> ServingConfig:
    return make_config(pools={"prefill": {"count": prefill}, "decode": {"count": decode, **decode_keys}})

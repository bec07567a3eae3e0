"""Looks after the workers of a running cluster, every second, by the reports of the routers.

- One that stays slow is kept out of use until it has recovered (slow_workers.py).
- One that fails attempts which its peers do not fail is put on trial, as are two of its peers. If it fails that, its
  process is ended, and the supervisor starts a successor; its requests go on elsewhere. If not, it was not to blame:
  the network, or a peer that it pulled from.

Workers of a pool that is being changed are left alone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.changes.change import Changes
from cluster.health.slow_workers import SlowWorkerAction, SlowWorkers, WorkerObservation
from cluster.health.trial import Answers, TrialFailed, Try, compare
from cluster.health.worker_health import WorkerHealth, find_failing, merge
from cluster.processes.life import Standing
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import POOLS
from cluster.processes.workforce import Workforce
from common.clock import Clock
from common.config import PoolConfig, ServingConfig

logger = logging.getLogger(__name__)

LOOK_S = 1.0
TRIAL_PAUSE_S = 3.0
"""Time between two trials of a worker that is kept out."""
SUSPICION_PAUSE_S = 30.0
"""Time after a trial in which the same worker is not put on trial for its failures again."""
NUM_PEERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    task: "asyncio.Task[None]"
    begun_s: float


class HealthMonitor:
    """Looks every second, and begins what has to be done. Event loop only."""

    def __init__(
        self, workforce: Workforce, changes: Changes, *, config: Callable[[], ServingConfig], try_: Try, clock: Clock
    ) -> None:
        """`config`: the present configuration; `try_` puts a worker on trial."""
        self._workforce = workforce
        self._changes = changes
        self._config = config
        self._try = try_
        self._clock = clock
        self._slow = {role: SlowWorkers(clock) for role in POOLS}
        self._kept_out: set[str] = set()
        self._trials: dict[str, _Trial] = {}

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look while the block runs."""
        task = asyncio.create_task(self._watch(), name="health monitor")
        try:
            yield
        finally:
            tasks = [task, *(trial.task for trial in self._trials.values())]
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:  # the top of a task: the next look may succeed
                logger.exception("cannot look after the workers")

    def look(self) -> None:
        """Look once, and begin what has to be done."""
        health = merge(self._workforce.routers.worker_health)
        for role in POOLS:
            processes = self._workforce.workers(role)
            self._kept_out -= {each.name for each in processes if each.life.standing is not Standing.DRAINING}
            if self._changes.touching([role]):
                continue
            workers = [self._worker(each, health.get(each.name)) for each in processes]
            by_name = {each.name: each for each in processes}
            for name, action in self._slow[role].look(workers).items():
                self._carry_out(action, by_name[name], health.get(name))
            for name in self._kept_out & by_name.keys():
                self._put_on_trial(by_name[name], pause_s=TRIAL_PAUSE_S)
            present = {each.name: health[each.name] for each in processes if each.name in health}
            for name in find_failing(present):
                self._put_on_trial(by_name[name], pause_s=SUSPICION_PAUSE_S, peers=self._peers(by_name[name]))
        names = {each.name for role in POOLS for each in self._workforce.workers(role)}
        self._kept_out &= names
        self._trials = {name: trial for name, trial in self._trials.items() if name in names or not trial.task.done()}

    async def settled(self) -> None:
        """Wait until no trial runs."""
        tasks = [trial.task for trial in self._trials.values()]
        if tasks:
            await asyncio.wait(tasks)

    def _worker(self, process: ManagedProcess, health: WorkerHealth | None) -> WorkerObservation:
        pool: PoolConfig = getattr(self._config().pools, process.spec.role)
        standing = process.life.standing
        return WorkerObservation(
            name=process.name,
            pool=process.generation,
            slow_drain_s=pool.slow_drain_s,
            is_in_use=standing is Standing.MEMBER and process.address is not None,
            is_kept_out=process.name in self._kept_out,
            is_empty=not self._workforce.routers.num_users(process.name),
            health=health if process.address is not None else None,
        )

    def _carry_out(self, action: SlowWorkerAction, process: ManagedProcess, health: WorkerHealth | None) -> None:
        slowness = health.slowness if health is not None else None
        extra = {"worker_id": process.name, "slowness": slowness}
        match action:
            case SlowWorkerAction.KEEP_OUT:
                logger.warning("worker stays slow: it is kept out of use until it recovers", extra=extra)
                self._kept_out.add(process.name)
                self._workforce.keep_out_worker(process)
            case SlowWorkerAction.TAKE_BACK:
                logger.info("worker is used again", extra=extra)
                self._kept_out.discard(process.name)
                self._workforce.keep_worker(process)
            case SlowWorkerAction.REPLACE:
                logger.warning("worker stays slow: it gets a new process", extra=extra)
                self._workforce.replace_process(process, "it stayed slow")

    def _peers(self, one: ManagedProcess) -> list[ManagedProcess]:
        """Return workers that give the same answers, of both pools, its own first."""
        beside = [
            each
            for role in sorted(POOLS, key=lambda role: role is not one.spec.role)
            for each in self._workforce.workers(role)
            if each is not one and each.generation == one.generation and each.life.standing is Standing.MEMBER
        ]
        return [each for each in beside if each.address is not None][:NUM_PEERS]

    def _put_on_trial(self, process: ManagedProcess, *, pause_s: float, peers: Collection[ManagedProcess] = ()) -> None:
        last, now_s = self._trials.get(process.name), self._clock.monotonic()
        if process.address is None or (last is not None and not last.task.done()):
            return
        if last is not None and now_s - last.begun_s < pause_s:
            return
        task = asyncio.create_task(self._judge(process, process.address, peers), name=f"trial of {process.name}")
        self._trials[process.name] = _Trial(task=task, begun_s=now_s)

    async def _judge(self, process: ManagedProcess, address: str, peers: Collection[ManagedProcess]) -> None:
        try:
            own, *others = await asyncio.gather(
                self._try(address), *(self._answers_of(peer) for peer in peers), return_exceptions=True
            )
            if isinstance(own, BaseException):
                raise own
            if own is not None:
                compare(own, [each for each in others if isinstance(each, tuple)])
                logger.debug("trial passed", extra={"worker_id": process.name, "num_peers": len(others)})
        except TrialFailed as failure:
            if process.address == address and process.name not in self._kept_out:
                logger.error(
                    "worker failed its trial: %s; its process is ended", failure, extra={"worker_id": process.name}
                )
                self._workforce.replace_process(process, f"failed its trial: {failure}", grace_s=0.0)
        except Exception:  # the top of a task
            logger.exception("trial broke", extra={"worker_id": process.name})

    async def _answers_of(self, peer: ManagedProcess) -> Answers | None:
        return None if peer.address is None else await self._try(peer.address)

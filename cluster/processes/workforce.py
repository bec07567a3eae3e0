"""The processes of a running cluster: which work together, and the steps that a change is made of.

Processes of one *generation* agree in the model, its formats, the block size and the longest sequence: their workers
can exchange KV and continue each other's answers. There are two generations during a `changeover`, else one. A router
gets the workers of its own generation only.
"""

import asyncio
import contextlib
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from cluster.processes.diff import generation_of
from cluster.processes.evacuation import Evacuation, Peer
from cluster.processes.launcher import Launcher, StartFailed
from cluster.processes.life import Standing
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import POOLS, ProcessRole, ProcessSpec, pool_order
from cluster.processes.routers import Routers
from cluster.processes.state import ClusterPhase
from common.clock import SystemClock
from common.config import PoolConfig, ServingConfig
from common.errors import EngineFault
from common.structured import completed
from common.trust.channels import Reach
from common.wire_names import ROLE_NUMBERS
from kvrelay.v1 import router_admin_pb2

logger = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S = 60.0
"""Time for the routers to use a worker that serves."""
_LOOK_S = 5.0
"""Time after which a new process that does not serve is asked whether it lacks room, again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGrace:
    """Time that processes may take to stop before they are killed."""

    router_s: float = 12.0
    """Longer than the 10 s after which a router cancels its last requests."""
    worker_s: float = 7.0
    """Longer than the 5 s after which a worker does."""

    def of(self, role: ProcessRole) -> float:
        """Return the grace of a process in a role."""
        return self.router_s if role is ProcessRole.ROUTER else self.worker_s


class Workforce:
    """All processes of one cluster. Event loop only."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        specs: Sequence[ProcessSpec],
        launcher: Launcher,
        reach: Reach,
        grace: StopGrace,
        changed: Callable[[ManagedProcess], None],
    ) -> None:
        """`changed` is called after every change of a process, and after its removal."""
        self.phase = ClusterPhase.STARTING
        """Phase of the cluster. The supervisor alone sets it; nothing is started any more at its end."""
        self.reach = reach
        """How the controller calls its processes."""
        self._config = config
        self._grace = grace
        self._changed = changed
        clock = SystemClock()
        routers = [spec for spec in specs if spec.role is ProcessRole.ROUTER]
        self.routers = Routers(config.router, routers, self._members_of, reach.router, clock=clock)
        self._make = partial(
            ManagedProcess, launcher=launcher, connect=reach.worker, clock=clock, changed=self._process_changed
        )
        self.processes = [self._new_process(spec) for spec in specs]
        for process in self.processes:
            process.life.stand(Standing.MEMBER)
        self._evacuation = Evacuation(reach)

    def workers(self, role: ProcessRole) -> list[ManagedProcess]:
        """Return the processes in a role. The last ones are stopped, or flipped, first (`plan.pool_order`)."""
        pool = [process for process in self.processes if process.spec.role is role]
        return sorted(pool, key=lambda process: pool_order(process.spec))

    async def add_worker(self, spec: ProcessSpec, report: Callable[[str], None] = lambda _step: None) -> int:
        """Start and warm one more process; returns the blocks it was warmed with, once the routers use it.

        `report` is called with the room that it waits for.

        Raises StartFailed. Then, and when it is cancelled, nothing is left of the process.
        """
        if self.phase.is_end:
            raise StartFailed("the cluster is being stopped")
        process = self._new_process(spec)
        self.processes.append(process)
        keeping = process.keep(asyncio.create_task)
        served = asyncio.create_task(process.served.wait())
        try:
            reported = ""
            while not (await asyncio.wait((keeping, served), timeout=_LOOK_S, return_when=FIRST_COMPLETED))[0]:
                if (missing := process.missing_room) and missing != reported:
                    report(f"{spec.name} waits for {missing}")
                reported = missing
            if keeping.done():
                keeping.result()
            num_blocks = await self._warm(process)
            process.life.stand(Standing.MEMBER)
            self.routers.worker_changed()
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                await self._until_accepted(process)
            return num_blocks
        except (StartFailed, asyncio.CancelledError):
            await self.remove_worker(process)
            raise
        except TimeoutError:
            await self.remove_worker(process)
            raise StartFailed(f"the routers do not use it after {ACCEPT_TIMEOUT_S:g} s; see their logs") from None
        finally:
            served.cancel()

    async def drain_router(self, process: ManagedProcess, *, grace_s: float) -> None:
        """Have a router refuse new requests and serve its own, for at most that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s if process.address is not None else 0):
                await self.routers.until_idle(process.name)

    async def drain_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        """Have a worker's requests moved away; returns how many it still has after the grace."""
        self.keep_out_worker(process)
        if process.address is None:  # it is down, so nothing runs on it
            return 0
        try:
            async with asyncio.timeout(grace_s):
                await self.routers.until_empty(process.name, among=self._routers_beside(process))
        except TimeoutError:
            return self.routers.num_users(process.name)
        return 0

    def keep_out_worker(self, process: ManagedProcess) -> None:
        """Give a worker no new requests, and have its own moved away."""
        if process.life.standing is Standing.MEMBER:
            process.life.stand(Standing.DRAINING)
        self.routers.worker_changed()

    def replace_process(self, process: ManagedProcess, reason: str, *, grace_s: float | None = None) -> None:
        """Have the process of a worker ended, for a successor to start; returns at once. Its standing stays.

        `grace_s`: time to stop in order; None: as long as any process of its role may take.
        """
        process.end_life(reason, grace_s=self._grace.of(process.spec.role) if grace_s is None else grace_s)

    def keep_worker(self, process: ManagedProcess) -> None:
        """Have a draining worker get requests again."""
        if process.life.standing is Standing.DRAINING:
            process.life.stand(Standing.MEMBER)
            self.routers.worker_changed()

    async def flip_worker(self, process: ManagedProcess, role: ProcessRole, *, grace_s: float) -> None:
        """Give a drained worker the other role; returns when the routers use it.

        Raises EngineFault if they do not; another KvrelayError if the worker keeps its old role and serves in it.
        """
        process.life.stand(Standing.APART)
        self.routers.worker_changed()
        try:
            await process.change_role(role, grace_s=grace_s)
        finally:
            process.life.stand(Standing.MEMBER)
            self.routers.worker_changed()
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                await self._until_accepted(process)
        except TimeoutError:
            raise EngineFault(
                f"{process.name} changed to {role}, but the routers do not use it after {ACCEPT_TIMEOUT_S:g} s;"
                " see their logs"
            ) from None

    async def evacuate_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        """Move a drained worker's hottest prefixes to workers that stay; returns how many blocks moved."""
        if process.address is None:
            return 0
        return await self._evacuation.evacuate(_peer(process), self._peers(process), grace_s=grace_s)

    async def remove_worker(self, process: ManagedProcess) -> None:
        """Withdraw a process from the routers and stop it, also if the caller is cancelled meanwhile."""
        await completed(self._remove(process))

    async def _remove(self, process: ManagedProcess) -> None:
        process.life.stand(Standing.APART)
        self.routers.worker_changed()
        await process.stop(self._grace.of(process.spec.role))
        self.processes.remove(process)
        self._process_changed(process)

    async def stop(self) -> None:
        """Stop the routers, whose last requests need the workers, then the workers."""
        await asyncio.gather(*(process.let_die() for process in self.processes))
        for roles in ((ProcessRole.ROUTER,), POOLS):
            group = [process for process in self.processes if process.spec.role in roles]
            await asyncio.gather(*(process.stop(self._grace.of(process.spec.role)) for process in group))

    async def save_leaving_caches(self) -> NoReturn:
        """Evacuate, until cancelled, every worker that announces its own end.

        A worker does so on SIGTERM, from its host or its operator: it notifies the routers, which move its answers and
        name it in their next reply.
        """
        known: frozenset[str] = frozenset()
        async with asyncio.TaskGroup() as group:
            while True:
                leaving = await self.routers.until_leaving_changes(known)
                for process in self.processes:
                    if process.name in leaving - known and process.address is not None:
                        group.create_task(self._save_cache(process), name=f"evacuate {process.name}")
                known = leaving
        raise AssertionError("it ends only when it is cancelled")

    async def _save_cache(self, process: ManagedProcess) -> None:
        pool: PoolConfig = getattr(self._config.pools, process.spec.role)
        try:
            await self.evacuate_worker(process, grace_s=pool.drain_grace_s)
        except Exception:  # best effort: never fails the supervisor
            logger.exception("evacuation failed", extra={"worker_id": process.name})

    async def _until_accepted(self, process: ManagedProcess) -> None:
        """Wait until the routers use a worker, or a new router uses as many workers as its neighbours do.

        The state of the other workers does not matter: a sick one must not make a change fail.
        """
        name, routers = process.name, self._routers_beside(process)
        if process.spec.role in POOLS:
            await self.routers.until_used(name, ROLE_NUMBERS[process.spec.role], among=routers)
            return
        num_used = self.routers.num_ready_at([each for each in routers if each != name])
        if num_used is None:
            num_used = sum(each.address is not None for each in self._workers_beside(process))
        await self.routers.until_ready(num_used, among=[name])

    async def _warm(self, process: ManagedProcess) -> int:
        if process.spec.role not in POOLS or process.address is None:  # without KV; or it died, and is started again
            return 0
        return await self._evacuation.warm(_peer(process), self._peers(process))

    def _new_process(self, spec: ProcessSpec) -> ManagedProcess:
        return self._make(spec, generation=generation_of(spec.config or self._config))

    def _process_changed(self, process: ManagedProcess) -> None:
        if process.spec.role is ProcessRole.ROUTER:
            self.routers.router_changed(process.name, process.address, process.admin_address)
        else:
            self.routers.worker_changed()
        self._changed(process)

    # Views of one generation.

    def _workers_beside(self, one: ManagedProcess) -> list[ManagedProcess]:
        return [each for each in self.processes if each.spec.role in POOLS and each.generation == one.generation]

    def _routers_beside(self, one: ManagedProcess) -> list[str]:
        routers = (each for each in self.processes if each.spec.role is ProcessRole.ROUTER)
        return [each.name for each in routers if each.generation == one.generation]

    def _peers(self, one: ManagedProcess) -> list[Peer]:
        """Return the workers that stay and can exchange KV with this one."""
        leaving = self.routers.leaving
        members = (each for each in self._workers_beside(one) if each.life.standing is Standing.MEMBER)
        return [_peer(each) for each in members if each.address is not None and each.name not in leaving]

    def _members_of(self, router: str) -> router_admin_pb2.SetWorkersRequest:
        """Return what a router is told of the workers; it has none once it has been removed."""
        members = [
            router_admin_pb2.WorkerEndpoint(
                worker_id=process.name,
                role=ROLE_NUMBERS[process.spec.role],
                address=process.address,
                draining=process.life.standing is Standing.DRAINING,
            )
            for own in self.processes
            if own.name == router
            for process in self._workers_beside(own)
            if process.address is not None and process.life.is_known_to_routers
        ]
        without_prefill = not self.workers(ProcessRole.PREFILL)
        return router_admin_pb2.SetWorkersRequest(workers=members, without_prefill=without_prefill)


def _peer(process: ManagedProcess) -> Peer:
    assert process.address is not None, f"{process.name} does not serve"
    return Peer(worker_id=process.name, address=process.address, role=process.spec.role)

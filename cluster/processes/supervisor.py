"""Keeps a cluster's processes running: starts routers and workers, restarts what dies, tells the routers, cleans up.

1. Start everything. When every process serves and every router uses every worker: phase READY.
2. Until told to stop: restart, push the membership, keep state.json true, change the pools as a scaler asks.
3. Stop: the routers drain first, since what they drain needs the workers; then the workers.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import psutil

from cluster.changes.evacuation import Evacuation, Peer
from cluster.changes.farewell import Farewells
from cluster.changes.scaling import POOLS
from cluster.processes.generations import Generations
from cluster.processes.launcher import Launcher, StartFailed
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.routers import Routers
from cluster.processes.starter import Up
from cluster.processes.state import ClusterPhase, ClusterState, StateFile
from cluster.processes.worker_names import home_first
from cluster.ray import settings as ray_settings
from cluster.trust import Trust
from common.clock import SystemClock
from common.config import ServingConfig
from common.errors import EngineFault
from common.process import ProcessIdentity
from kvrelay.v1 import router_admin_pb2, worker_pb2

logger = logging.getLogger(__name__)

_ACCEPT_TIMEOUT_S = 30.0
_ADOPT_TIMEOUT_S = 10.0
_WIRE_ROLES = {
    ProcessRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    ProcessRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGrace:
    """How long processes may take to stop before they are killed."""

    router_s: float = 12.0
    """The router itself cancels what is left after 10 s."""
    worker_s: float = 7.0
    """Workers do so after 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a cluster stands on."""

    launcher: Launcher
    trust: Trust
    state_file: StateFile


class Supervisor:
    """Runs one cluster. Event loop of the main thread only."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        specs: Sequence[ProcessSpec],
        ground: Ground,
        report: Callable[[str], None],
        grace: StopGrace | None = None,
    ) -> None:
        self._config = config
        launcher, reach = ground.launcher, ground.trust.reach
        self.reach = reach
        """How it calls its processes."""
        self._state_file = ground.state_file
        self._report = report
        self._grace = grace or StopGrace()
        self._phase = ClusterPhase.STARTING
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None, "this process is alive"
        self._identity = identity
        clock = SystemClock()
        routers = [spec for spec in specs if spec.role is ProcessRole.ROUTER]
        self._generations = Generations(config)
        self._routers = Routers(config.router, routers, self._members_of, reach.router, clock=clock)
        self._new_process = partial(
            ManagedProcess, launcher=launcher, connect=reach.worker, clock=clock, changed=self._process_changed
        )
        self._processes = [self._new_process(spec) for spec in specs]
        self._draining: set[str] = set()
        self._gone: set[str] = set()
        """On their way out: no members any more."""
        self._warming: set[str] = set()
        """On their way in: no members yet."""
        self._evacuation = Evacuation(reach)
        self._farewells = Farewells(
            self._routers, self._evacuation, pools=config.pools, serving=self._serving, staying=self._peers
        )
        self._founders: dict[str, asyncio.Task[NoReturn]] = {}
        """What keeps the first workers running; the cluster fails when one of them does not start."""
        self._added: dict[str, asyncio.Task[StartFailed]] = {}
        """What keeps workers running that came later; ends only when one did not start."""
        self._all_served = asyncio.Event()
        self._adopts = False
        self._door_tls = ground.trust.door_tls
        self._is_stopping = False
        """Nothing is started any more, whatever change of the pools is under way."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each router, as a client dials it."""
        return self._routers.addresses

    @property
    def admin_addresses(self) -> tuple[str, ...]:
        """host:port where each router that runs is administered."""
        return self._routers.admin_addresses

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """The same of their HTTP doors; empty without any."""
        return self._routers.http_addresses

    @property
    def up(self) -> Up:
        """Where it serves, or will."""
        return Up(
            addresses=self.addresses, http_addresses=self.http_addresses, pid=self._identity.pid, tls=self._door_tls
        )

    def adopt(self) -> None:
        """Take every process for one that an earlier supervisor has left: no failure to start it ends the cluster.

        The router goes on with the membership that it knows until this supervisor knows all of it too.
        """
        self._adopts = True
        for process in self._processes:
            process.adopt()

    async def run(self, stopping: asyncio.Event, *, on_ready: Callable[[], None]) -> None:
        """Serve until `stopping`, then stop everything. Raises StartFailed when the cluster does not come up."""
        self._save()
        serving = asyncio.create_task(self._serve(on_ready))
        stop_wanted = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait([serving, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop_wanted.cancel()
            serving.cancel()
            await asyncio.wait([serving, stop_wanted])
            self._is_stopping = True
            failed = not serving.cancelled()
            self._enter(ClusterPhase.FAILED if failed else ClusterPhase.STOPPING)
            for keeper in self._added.values():
                keeper.cancel()
            await asyncio.gather(*self._added.values(), return_exceptions=True)
            await self._stop_all()
        if failed:
            serving.result()

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for process in self._processes:
                    self._founders[process.spec.name] = tasks.create_task(process.keep_running())
                if self._adopts:
                    await self._until_known()
                tasks.create_task(self._routers.run())
                tasks.create_task(self._farewells.run())
                if not self._adopts:
                    await self._until_ready()
                self._enter(ClusterPhase.READY)
                on_ready()
        except* StartFailed as failures:
            first = failures.exceptions[0]
            raise StartFailed(str(first)) from None

    async def _until_known(self) -> None:
        """Wait until every process that was left has answered; whoever cannot is away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                await self._all_served.wait()

    async def _until_ready(self) -> None:
        await self._all_served.wait()
        num_workers = sum(process.spec.role in POOLS for process in self._processes)
        try:
            async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                await self._routers.until_ready(num_workers, among=self._routers.names)
        except TimeoutError:
            used = f"{self._routers.num_ready} of {num_workers} workers"
            raise StartFailed(f"the routers use only {used} after {_ACCEPT_TIMEOUT_S:g} s; see their logs") from None

    # What a scaler may do (scaling.Workforce).

    def workers(self, role: ProcessRole) -> list[ManagedProcess]:
        """Return a pool, whoever should go first at the end."""
        pool = [process for process in self._processes if process.spec.role is role]
        return sorted(pool, key=lambda process: home_first(process.spec))

    async def add_worker(self, spec: ProcessSpec) -> int:
        """Start one more and warm it; returns with how many blocks, when the routers use it.

        Raises StartFailed, and then nothing is left of it.
        """
        if self._is_stopping:
            raise StartFailed("the cluster is being stopped")
        process = self._new_process(spec)
        self._warming.add(spec.name)
        self._processes.append(process)
        keeper = self._added[spec.name] = asyncio.create_task(_keep_running(process), name=f"keep {spec.name}")
        served = asyncio.create_task(process.served.wait())
        try:
            await asyncio.wait((keeper, served), return_when=asyncio.FIRST_COMPLETED)
            if keeper.done():
                raise keeper.result()
            num_blocks = await self._warm(process)
            self._warming.discard(spec.name)
            self._routers.worker_changed()
            async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                await self._until_accepted(spec)
            return num_blocks
        except (StartFailed, TimeoutError) as error:
            await self.remove_worker(process)
            if isinstance(error, StartFailed):
                raise
            raise StartFailed(f"the routers do not use it after {_ACCEPT_TIMEOUT_S:g} s; see their logs") from None
        finally:
            served.cancel()
            self._warming.discard(spec.name)

    async def _until_accepted(self, spec: ProcessSpec) -> None:
        """Wait until the routers use a new worker, or a new router as many workers as its neighbours do.

        Whether the other workers are well is another matter: one that is not must not make a change fail.
        """
        if spec.role in POOLS:
            await self._routers.until_used(spec.name, _WIRE_ROLES[spec.role], among=self._routers_beside(spec.name))
            return
        neighbours = [name for name in self._routers_beside(spec.name) if name != spec.name]
        num_serving = sum(each.address is not None for each in self._workers_beside(spec.name))
        num_used = self._routers.num_ready_at(neighbours)
        await self._routers.until_ready(num_serving if num_used is None else num_used, among=[spec.name])

    async def _warm(self, process: ManagedProcess) -> int:
        if process.address is None:  # it has died already, and is started again
            return 0
        return (await self._evacuation.warm(_as_peer(process), self._peers(process.spec.name))).num_blocks

    async def drain_router(self, process: ManagedProcess, *, grace_s: float) -> None:
        """Have a router take nothing new and serve what it has, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s if process.address is not None else 0):
                await self._routers.until_idle(process.spec.name)

    async def drain_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        """Let a worker give its requests away; returns how many it still had when the grace was over."""
        name = process.spec.name
        self._draining.add(name)
        if process.address is None:  # it is away, and no member: nothing runs on it
            return 0
        self._routers.worker_changed()
        try:
            async with asyncio.timeout(grace_s):
                await self._routers.until_empty(name, among=self._routers_beside(name))
        except TimeoutError:
            return self._routers.num_users(name)
        return 0

    async def flip_worker(self, process: ManagedProcess, role: ProcessRole, *, grace_s: float) -> None:
        """Give a drained worker the other role; returns when the routers use it.

        Raises EngineFault when they do not, another KvrelayError when the worker still has its old role, and serves.
        """
        name = process.spec.name
        self._gone.add(name)
        self._routers.worker_changed()
        try:
            await process.change_role(role, grace_s=grace_s)
        finally:
            self._gone.discard(name)
            self._draining.discard(name)
            self._routers.worker_changed()
        try:
            async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                await self._routers.until_used(name, _WIRE_ROLES[role], among=self._routers_beside(name))
        except TimeoutError:
            raise EngineFault(
                f"{name} changed to {role}, but the routers do not use it after {_ACCEPT_TIMEOUT_S:g} s; see their logs"
            ) from None

    async def evacuate_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        """Move the hottest prefixes of a drained worker to those that stay; returns how many blocks moved."""
        if process.address is None:
            return 0
        peers = self._peers(process.spec.name)
        return (await self._evacuation.evacuate(_as_peer(process), peers, grace_s=grace_s)).num_blocks

    async def remove_worker(self, process: ManagedProcess) -> None:
        """Take a worker out of the membership and stop it."""
        name = process.spec.name
        self._gone.add(name)
        self._routers.worker_changed()
        keeper = self._added.pop(name, None) or self._founders.pop(name)
        keeper.cancel()
        await asyncio.wait((keeper,))
        await process.stop(self._grace.router_s if process.spec.role is ProcessRole.ROUTER else self._grace.worker_s)
        self._processes.remove(process)
        self._gone.discard(name)
        self._draining.discard(name)
        self._save()

    def _process_changed(self, process: ManagedProcess) -> None:
        if process.spec.role is ProcessRole.ROUTER:
            self._routers.router_changed(process.spec.name, process.address, process.admin_address)
        else:
            self._routers.worker_changed()
        if self._phase is ClusterPhase.STARTING and process.address is not None:
            served = sum(1 for each in self._processes if each.address is not None)
            self._report(f"{process.spec.name} is up ({served} of {len(self._processes)})")
        if all(each.num_lives > 0 for each in self._processes):
            self._all_served.set()
        self._save()

    def _beside(self, name: str) -> list[ManagedProcess]:
        """Return every process of the generation of the one of that name."""
        own = [self._generations.of(process.spec) for process in self._processes if process.spec.name == name]
        return [process for process in self._processes if self._generations.of(process.spec) in own]

    def _workers_beside(self, name: str) -> list[ManagedProcess]:
        return [process for process in self._beside(name) if process.spec.role in POOLS]

    def _routers_beside(self, name: str) -> list[str]:
        return [process.spec.name for process in self._beside(name) if process.spec.role is ProcessRole.ROUTER]

    def _peers(self, name: str) -> list[Peer]:
        """Return the workers that stay, and can exchange KV with the one of that name."""
        apart = self._gone | self._draining | self._warming | self._routers.leaving
        workers = (process for process in self._workers_beside(name) if process.spec.name not in apart)
        return [_as_peer(process) for process in workers if process.address is not None]

    def _serving(self) -> list[Peer]:
        workers = (process for role in POOLS for process in self.workers(role))
        return [_as_peer(process) for process in workers if process.address is not None]

    def _members_of(self, router: str) -> list[router_admin_pb2.WorkerEndpoint]:
        """Return what a router that runs is told: the workers of its generation."""
        apart = self._gone | self._warming
        return [
            router_admin_pb2.WorkerEndpoint(
                worker_id=process.spec.name,
                role=_WIRE_ROLES[process.spec.role],
                address=process.address,
                draining=process.spec.name in self._draining,
            )
            for process in self._workers_beside(router)
            if process.address is not None and process.spec.name not in apart
        ]

    async def _stop_all(self) -> None:
        routers = [each for each in self._processes if each.spec.role is ProcessRole.ROUTER]
        workers = [each for each in self._processes if each.spec.role is not ProcessRole.ROUTER]
        for group, grace_s in ((routers, self._grace.router_s), (workers, self._grace.worker_s)):
            await asyncio.gather(*(each.stop(grace_s) for each in group))

    def _enter(self, phase: ClusterPhase) -> None:
        self._phase = phase
        logger.info("cluster %s", phase)
        self._save()

    def _save(self) -> None:
        """Write state.json. It tells people and later processes; the cluster runs without it, on a full disk say."""
        try:
            self._state_file.write(self._state())
        except OSError as error:
            logger.error("state not written: %s", error)

    def _state(self) -> ClusterState:
        processes = tuple(process.state() for process in self._processes)
        known = {state.identity for state in processes}
        below = (ProcessIdentity.of(child.pid) for child in psutil.Process().children(recursive=True))
        return ClusterState(
            name=self._config.name,
            launcher=self._config.launcher,
            phase=self._phase,
            supervisor=self._identity,
            addresses=self.addresses,
            http_addresses=self.http_addresses,
            tls=self._door_tls,
            processes=processes,
            helpers=tuple(each for each in below if each is not None and each not in known),
            ray_environment=ray_settings.of_joined_cluster(self._config.launcher),
        )


def _as_peer(process: ManagedProcess) -> Peer:
    assert process.address is not None, f"{process.spec.name} does not serve"
    return Peer(worker_id=process.spec.name, address=process.address, role=process.spec.role)


async def _keep_running(process: ManagedProcess) -> StartFailed:
    """Keep a process running until cancelled; returns why when its first start fails."""
    try:
        await process.keep_running()
    except StartFailed as error:
        return error

"""Runs one cluster: starts its processes, restarts those that die, keeps the routers informed, stops everything.

1. Start everything. When every process serves and every router uses every worker: phase READY.
2. Until it is asked to stop: keep the processes running and state.json current. Changes are made through the
   `workforce`.
3. Have the changes under way end. Stop the routers first, since their last requests need the workers; then the workers.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from cluster.processes.launcher import Launcher, StartFailed
from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import POOLS, ProcessSpec
from cluster.processes.starter import Up
from cluster.processes.state import ClusterPhase, ClusterState, StateFile
from cluster.processes.workforce import ACCEPT_TIMEOUT_S, StopGrace, Workforce
from cluster.trust import Trust
from common.config import ServingConfig
from common.process import ProcessIdentity

logger = logging.getLogger(__name__)

_ADOPT_TIMEOUT_S = 10.0
_REMIND_S = 20.0
"""Silence after which a start says what it waits for: large models take minutes to load, and new ones to compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorContext:
    """The launcher, the authority and the files that a supervisor works with."""

    launcher: Launcher
    trust: Trust
    state_file: StateFile
    ray_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment that reaches the joined Ray cluster; empty without one."""


async def _no_changes() -> None:
    """Nothing changes."""


class Supervisor:
    """Runs one cluster. Event loop of the main thread only."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        specs: Sequence[ProcessSpec],
        context: SupervisorContext,
        report: Callable[[str], None],
        grace: StopGrace | None = None,
    ) -> None:
        """`report` is called with each process that comes up, and from time to time with those that have not."""
        self._config = config
        self._context = context
        self._report = report
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None, "this process is alive"
        self._identity = identity
        self._all_served = asyncio.Event()
        self.workforce = Workforce(
            config,
            specs=specs,
            launcher=context.launcher,
            reach=context.trust.reach,
            grace=grace or StopGrace(),
            changed=self._process_changed,
        )

    @property
    def up(self) -> Up:
        """The addresses at which it serves, or will."""
        routers, tls = self.workforce.routers, self._context.trust.door_tls
        return Up(addresses=routers.addresses, http_addresses=routers.http_addresses, pid=self._identity.pid, tls=tls)

    def adopt(self) -> None:
        """Treat every process as left by an earlier supervisor: a failure to start it does not end the cluster.

        A router keeps the workers that it knows until this supervisor knows all of them too.
        """
        self.workforce.phase = ClusterPhase.ADOPTING
        for process in self.workforce.processes:
            process.life.is_adopted = True

    async def run(
        self,
        stopping: asyncio.Event,
        *,
        on_ready: Callable[[], None],
        end_changes: Callable[[], Awaitable[None]] = _no_changes,
    ) -> None:
        """Serve until `stopping`, then stop everything, after `end_changes`.

        Raises StartFailed if the cluster does not come up.
        """
        self._save()
        serving = asyncio.create_task(self._serve(on_ready))
        stop_wanted = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait([serving, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # From here on nothing is started. Routers still report until the changes have ended.
            self._enter(ClusterPhase.FAILED if serving.done() else ClusterPhase.STOPPING)
            await end_changes()
            stop_wanted.cancel()
            serving.cancel()
            await asyncio.wait([serving, stop_wanted])
            await self.workforce.stop()
        if not serving.cancelled():
            serving.result()

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        workforce = self.workforce
        is_takeover = workforce.phase is ClusterPhase.ADOPTING
        failed: list[StartFailed] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for process in workforce.processes:
                    process.keep(tasks.create_task)  # in the group: the cluster fails if one of them does not start
                if is_takeover:
                    await self._until_known()
                tasks.create_task(workforce.routers.run())
                tasks.create_task(workforce.save_leaving_caches())
                if not is_takeover:
                    await self._until_ready()
                if not workforce.phase.is_end:
                    self._enter(ClusterPhase.READY)
                    on_ready()
        except* StartFailed as failures:
            failed += [each for each in failures.exceptions if isinstance(each, StartFailed)]
        if failed:
            # Some releases of Python 3.11 put an exception that is raised in the clause itself into another group.
            raise failed[0]

    async def _until_known(self) -> None:
        """Wait until every adopted process has answered; those that do not in time count as down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                await self._all_served.wait()

    async def _remind(self) -> None:
        """Report from time to time which processes have not come up yet; forever."""
        while True:
            await asyncio.sleep(_REMIND_S)
            missing_by_name = {
                each.name: each.missing_room for each in self.workforce.processes if each.address is None
            }
            if names := [name for name, missing in missing_by_name.items() if not missing]:
                self._report(f"waiting for {', '.join(names)}: models are loaded, new ones compiled; `kvrelay logs`")
            for name, missing in missing_by_name.items():
                if missing:
                    self._report(f"{name} waits for {missing}")

    async def _until_ready(self) -> None:
        reminders = asyncio.create_task(self._remind())
        try:
            await self._all_served.wait()
        finally:
            reminders.cancel()
        routers = self.workforce.routers
        num_workers = sum(process.spec.role in POOLS for process in self.workforce.processes)
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                await routers.until_ready(num_workers, among=routers.names)
        except TimeoutError:
            used = f"{routers.num_ready} of {num_workers} workers"
            raise StartFailed(f"the routers use only {used} after {ACCEPT_TIMEOUT_S:g} s; see their logs") from None
        if routers.shortage:
            self._report(routers.shortage)

    def _process_changed(self, process: ManagedProcess) -> None:
        processes = self.workforce.processes
        if self.workforce.phase in (ClusterPhase.STARTING, ClusterPhase.ADOPTING) and process.address is not None:
            num_serving = sum(each.address is not None for each in processes)
            self._report(f"{process.name} is up ({num_serving} of {len(processes)})")
        if all(each.life.num_lives > 0 for each in processes):
            self._all_served.set()
        self._save()

    def _enter(self, phase: ClusterPhase) -> None:
        self.workforce.phase = phase
        logger.info("cluster %s", phase)
        self._save()

    def _save(self) -> None:
        """Write state.json, best effort: the cluster runs without it, for example on a full disk."""
        try:
            self._context.state_file.write(self._state())
        except OSError as error:
            logger.error("state not written: %s", error)

    def _state(self) -> ClusterState:
        processes = tuple(process.state() for process in self.workforce.processes)
        known = {state.identity for state in processes}
        below = (ProcessIdentity.of(child.pid) for child in psutil.Process().children(recursive=True))
        up = self.up
        return ClusterState(
            name=self._config.name,
            launcher=self._config.launcher,
            phase=self.workforce.phase,
            supervisor=self._identity,
            addresses=up.addresses,
            http_addresses=up.http_addresses,
            tls=up.tls,
            processes=processes,
            helpers=tuple(each for each in below if each is not None and each not in known),
            ray_environment=self._context.ray_environment,
        )

"""Clusters of fake processes under a supervisor, with a scripted router."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.processes.launch_local import LocalLauncher
from cluster.processes.launcher import Launcher
from cluster.processes.plan import HostResources, ProcessSpec, make_plan
from cluster.processes.state import ClusterState, ProcessState, StateFile
from cluster.processes.supervisor import Supervisor, SupervisorContext
from cluster.processes.workforce import StopGrace
from cluster.trust import Trust
from common.process import ProcessIdentity, Ready
from tests.cluster.support import RecordingRouter, fake_command, make_config, recording_router
from tests.trust import AUTHORITY


@dataclass
class Life:
    """A life of a process that is only an address; ends when it is stopped."""

    ready: Ready
    identity: ProcessIdentity | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def exited(self) -> str:
        await self.over.wait()
        return "stopped"

    async def stop(self, grace_s: float) -> None:
        self.over.set()


class FakeLauncher:
    """The part of a Launcher that shares nothing and has room for everything."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def found(self) -> frozenset[str]:
        return frozenset()

    def missing_room_of(self, spec: ProcessSpec) -> str:
        return ""


@dataclass
class Cluster:
    router: RecordingRouter
    supervisor: Supervisor
    state_file: StateFile
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    reports: list[str] = field(default_factory=list)

    def state(self) -> ClusterState:
        state = self.state_file.read()
        assert state is not None
        return state

    def process(self, name: str) -> ProcessState:
        return next(each for each in self.state().processes if each.name == name)

    async def run(self) -> None:
        await self.supervisor.run(self.stopping, on_ready=self.ready.set)


@asynccontextmanager
async def make_cluster(
    run_dir: Path, launcher_for: Callable[[str], Launcher] | None = None, /, **modes: Sequence[str]
) -> AsyncIterator[Cluster]:
    """Make a supervisor of fake services in these modes, or of a launcher for the address of the scripted router."""
    by_name = {name.replace("_", "-"): mode for name, mode in modes.items()}
    async with recording_router() as (router, port):
        config, address = make_config(router={"port": port}), f"127.0.0.1:{port}"
        command = fake_command(routers=[address], modes=by_name)
        local = LocalLauncher(command=command, run_dir=run_dir, authority=AUTHORITY)
        context = SupervisorContext(
            launcher=local if launcher_for is None else launcher_for(address),
            trust=Trust(AUTHORITY, folder=run_dir, has_own_files=False),
            state_file=StateFile(run_dir),
        )
        reports: list[str] = []
        supervisor = Supervisor(
            config,
            specs=make_plan(config, HostResources(cores=2, gpus=None)),
            context=context,
            report=reports.append,
            grace=StopGrace(router_s=10, worker_s=0.5),
        )
        yield Cluster(router=router, supervisor=supervisor, state_file=context.state_file, reports=reports)


@asynccontextmanager
async def running_cluster(run_dir: Path, **modes: Sequence[str]) -> AsyncIterator[Cluster]:
    async with make_cluster(run_dir, **modes) as cluster, asyncio.TaskGroup() as tasks:
        tasks.create_task(cluster.run())
        try:
            async with asyncio.timeout(60):
                await cluster.ready.wait()
            yield cluster
        finally:
            cluster.stopping.set()

"""A supervisor that takes over what an earlier one has left: what it tells the router, and what may end it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.processes.launcher import StartFailed
from cluster.processes.plan import ProcessRole, ProcessSpec, make_plan
from cluster.processes.state import ClusterPhase, StateFile
from cluster.processes.supervisor import Ground, Supervisor
from cluster.trust import Trust
from common.process import ProcessIdentity, Ready
from tests.cluster.support import RecordingRouter, make_config, recording_router
from tests.trust import AUTHORITY, as_controller_of_router


@dataclass
class Running:
    """A process that never dies."""

    ready: Ready
    identity: ProcessIdentity | None = None

    async def exited(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self, grace_s: float) -> None:
        """Nothing runs."""


@dataclass
class Left:
    """A Launcher whose processes answer when the test says so."""

    router_address: str
    answers: dict[str, "asyncio.Future[None]"] = field(default_factory=dict)
    """By name: a result lets it serve, an exception is how its start fails, once."""

    async def open(self) -> None:
        """Nothing is shared."""

    async def close(self) -> None:
        """Nothing is shared."""

    def found(self) -> frozenset[str]:
        return frozenset(self.answers)

    async def start(self, spec: ProcessSpec) -> Running:
        if (answer := self.answers.pop(spec.name, None)) is not None:
            await answer
        address = self.router_address if spec.role is ProcessRole.ROUTER else f"{spec.name}.invalid:1"
        return Running(Ready(address=address, admin_address=address, metrics_port=0, pid=1))


@asynccontextmanager
async def taking_over(folder: Path, *awaited: str) -> AsyncIterator[tuple[RecordingRouter, Left, StateFile]]:
    """Run a supervisor that takes over router-0, prefill-0 and decode-0; those that are `awaited` do not answer yet."""
    async with recording_router() as (router, port), asyncio.TaskGroup() as tasks:
        config = make_config(router={"port": port})
        loop, state_file, stopping = asyncio.get_running_loop(), StateFile(folder), asyncio.Event()
        launcher = Left(f"127.0.0.1:{port}", {name: loop.create_future() for name in awaited})
        supervisor = Supervisor(
            config,
            specs=make_plan(config, None),
            ground=Ground(
                launcher=launcher,
                trust=Trust(AUTHORITY, folder=folder, has_own_files=False),
                state_file=state_file,
            ),
            report=lambda _: None,
        )
        supervisor.adopt()
        tasks.create_task(supervisor.run(stopping, on_ready=lambda: None))
        try:
            yield router, launcher, state_file
        finally:
            stopping.set()


async def ping(address: str) -> None:
    """Ask a server whether it is healthy, several times."""
    async with as_controller_of_router(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(3):
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)


async def test_router_hears_nothing_before_everybody_that_was_left_has_answered(tmp_path: Path) -> None:
    async with taking_over(tmp_path, "prefill-0") as (router, launcher, _):
        while "prefill-0" in launcher.answers:
            last = launcher.answers["prefill-0"]
            await asyncio.sleep(0)  # until its start has begun; the others answer at once
        await ping(launcher.router_address)  # as long as it takes to tell a router
        assert router.num_pushes == 0

        last.set_result(None)
        await router.until(lambda router: router.num_pushes > 0)

        assert [name for name, _, _ in router.workers] == ["prefill-0", "decode-0"]


async def test_worker_that_was_left_and_cannot_start_is_tried_again_and_ends_nothing(tmp_path: Path) -> None:
    async with taking_over(tmp_path, "decode-0") as (router, launcher, state_file):
        launcher.answers["decode-0"].set_exception(StartFailed("decode-0: its host is away"))

        await router.until(lambda router: len(router.workers) == 2)

        state = state_file.read()
        assert state is not None
        assert state.phase is ClusterPhase.READY
        (decode,) = (each for each in state.processes if each.name == "decode-0")
        assert decode.last_exit == "decode-0: its host is away"

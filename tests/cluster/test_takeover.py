"""A supervisor that takes over the processes of an earlier one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.processes.launcher import StartFailed
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.state import ClusterPhase
from common.process import ProcessIdentity, Ready
from tests.cluster.test_supervisor import Cluster, make_cluster
from tests.trust import as_controller_of_router


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
    """A Launcher whose processes answer when the test lets them."""

    router_address: str
    answers: dict[str, "asyncio.Future[None]"] = field(default_factory=dict)
    """Futures by name: a result lets the process serve, an exception fails its start once."""

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
async def taking_over(run_dir: Path, *awaited: str) -> AsyncIterator[tuple[Cluster, Left]]:
    """Run a supervisor that takes over router-0, prefill-0 and decode-0; the `awaited` ones do not answer yet."""
    loop = asyncio.get_running_loop()
    left = Left("", {name: loop.create_future() for name in awaited})

    def launcher_for(router_address: str) -> Left:
        left.router_address = router_address
        return left

    async with make_cluster(run_dir, launcher_for) as cluster, asyncio.TaskGroup() as tasks:
        cluster.supervisor.adopt()
        tasks.create_task(cluster.run())
        try:
            yield cluster, left
        finally:
            cluster.stopping.set()


async def ping(address: str) -> None:
    """Check the health of a server several times."""
    async with as_controller_of_router(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(3):
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)


async def test_router_is_told_nothing_before_every_adopted_process_has_answered(tmp_path: Path) -> None:
    async with taking_over(tmp_path, "prefill-0") as (cluster, launcher):
        router = cluster.router
        while "prefill-0" in launcher.answers:
            last = launcher.answers["prefill-0"]
            await asyncio.sleep(0)  # until its start has begun; the others answer at once
        await ping(launcher.router_address)  # as long as it takes to tell a router
        assert router.num_pushes == 0

        last.set_result(None)
        await router.until(lambda router: router.num_pushes > 0)

        assert [name for name, _, _ in router.workers] == ["prefill-0", "decode-0"]


async def test_adopted_worker_that_cannot_start_is_retried_and_ends_nothing(tmp_path: Path) -> None:
    async with taking_over(tmp_path, "decode-0") as (cluster, launcher):
        launcher.answers["decode-0"].set_exception(StartFailed("decode-0: its host is away"))

        await cluster.router.until(lambda router: len(router.workers) == 2)

        assert cluster.state().phase is ClusterPhase.READY
        assert cluster.process("decode-0").last_exit == "decode-0: its host is away"

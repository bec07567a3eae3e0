"""A supervised worker has the role of its spec, also after a change and after a restart in another role."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import ProcessRole, ProcessSpec
from common.clock import SystemClock
from common.errors import Overloaded, WorkerLost
from common.process import Ready
from kvrelay.v1 import worker_pb2
from tests.builders import make_request
from tests.cluster.supervised import FakeLauncher, Life
from tests.cluster.support import make_spec
from tests.trust import CONTROLLER
from tests.worker.cluster import Pool, running_pool
from worker.serving import RunningWorker

PREFILL, DECODE = ProcessRole.PREFILL, ProcessRole.DECODE


class OneWorker(FakeLauncher):
    """A Launcher that finds one worker, or an address without a worker."""

    def __init__(self, worker: RunningWorker) -> None:
        self.worker = worker
        self.address = worker.address
        self.lives: list[Life] = []
        self.started = asyncio.Event()

    async def start(self, spec: ProcessSpec) -> Life:
        self.lives.append(
            Life(Ready(address=self.address, admin_address=self.address, metrics_port=0, pid=1, role=self.worker.role))
        )
        self.started.set()
        return self.lives[-1]


def managed(launcher: OneWorker, role: ProcessRole) -> ManagedProcess:
    return ManagedProcess(
        make_spec("prefill-0", role),
        launcher=launcher,
        connect=CONTROLLER.worker,
        clock=SystemClock(),
        changed=lambda _process: None,
    )


@asynccontextmanager
async def kept(process: ManagedProcess) -> AsyncIterator[ManagedProcess]:
    keeper = asyncio.create_task(process.keep_running())
    try:
        yield process
    finally:
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper


@asynccontextmanager
async def one_worker() -> AsyncIterator[tuple[Pool, OneWorker]]:
    """Run a worker whose long answers last far beyond a test."""
    async with running_pool({"prefill-0": {"step_s": 0.1}}) as pool:
        yield pool, OneWorker(pool.workers["prefill-0"])


async def test_worker_restarted_in_an_earlier_role_gets_its_own_before_it_serves() -> None:
    async with one_worker() as (_pool, launcher), kept(managed(launcher, DECODE)) as process, asyncio.timeout(60):
        await process.served.wait()
        assert (launcher.worker.role, process.life.num_lives, len(launcher.lives)) == ("decode", 1, 1)


async def test_worker_that_does_not_take_its_role_is_restarted() -> None:
    async with one_worker() as (_pool, launcher):
        launcher.address = "127.0.0.1:1"  # without a server
        async with kept(managed(launcher, DECODE)) as process, asyncio.timeout(60):
            await launcher.started.wait()
            assert await launcher.lives[0].exited() == "stopped"
            launcher.address = launcher.worker.address
            await process.served.wait()
            assert launcher.worker.role == "decode"


async def test_role_change_survives_restarts() -> None:
    async with one_worker() as (_pool, launcher), kept(managed(launcher, PREFILL)) as process, asyncio.timeout(60):
        await process.served.wait()
        await process.change_role(DECODE, grace_s=0)
        assert (launcher.worker.role, process.spec.role) == ("decode", DECODE)
        runtime = launcher.worker.runtime
        await runtime.change_role(worker_pb2.WORKER_ROLE_PREFILL, epoch=runtime.epoch, grace_s=0)  # as a restart would
        process.served.clear()
        await launcher.lives[0].stop(0)
        await process.served.wait()
        assert launcher.worker.role == "decode"


async def test_role_change_of_a_busy_worker_is_refused() -> None:
    async with one_worker() as (pool, launcher), kept(managed(launcher, PREFILL)) as process, asyncio.timeout(60):
        await process.served.wait()
        running = pool.pair("prefill-0", "prefill-0").open_decode(
            make_request(range(20), max_tokens=450, ignore_eos=True), None
        )
        await running.read()
        with pytest.raises(Overloaded):
            await process.change_role(DECODE, grace_s=0)
        assert (launcher.worker.role, process.spec.role) == ("prefill", PREFILL)
        assert not launcher.lives[0].over.is_set()
        running.cancel()


async def test_role_change_of_a_silent_worker_restarts_it_in_its_old_role() -> None:
    async with one_worker() as (_pool, launcher):
        launcher.address = "127.0.0.1:1"
        async with kept(managed(launcher, PREFILL)) as process, asyncio.timeout(60):
            await process.served.wait()
            launcher.address = launcher.worker.address
            with pytest.raises(WorkerLost):
                await process.change_role(DECODE, grace_s=0)
            assert await launcher.lives[0].exited() == "stopped"
            assert process.spec.role is PREFILL


async def test_adopted_worker_keeps_its_role() -> None:
    async with one_worker() as (_pool, launcher):
        runtime = launcher.worker.runtime
        await runtime.change_role(worker_pb2.WORKER_ROLE_DECODE, epoch=runtime.epoch, grace_s=0)
        process = managed(launcher, PREFILL)
        process.life.is_adopted = True
        async with kept(process), asyncio.timeout(60):
            await process.served.wait()
            assert (launcher.worker.role, process.spec.role) == ("decode", DECODE)


async def test_role_change_of_a_worker_that_is_down_is_refused() -> None:
    async with one_worker() as (_pool, launcher):
        process = managed(launcher, PREFILL)
        with pytest.raises(WorkerLost, match="cannot call prefill-0: it is being started or stopped"):
            await process.change_role(DECODE, grace_s=0)

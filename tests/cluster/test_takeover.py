"""A supervisor that takes over the processes of an earlier one, and tries again while it cannot."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster import wiring
from cluster.processes.launcher import StartFailed
from cluster.processes.plan import ProcessRole, ProcessSpec, make_plan
from cluster.processes.state import ClusterPhase, StateFile
from cluster.takeover import TakeoverFailed, pause_unless, until_taken_over
from common.process import ProcessIdentity, Ready
from tests.cluster.supervised import Cluster, FakeLauncher, Life, make_cluster
from tests.cluster.support import make_config
from tests.cluster.test_state import make_state
from tests.trust import as_controller_of_router

DEAD = ProcessIdentity(pid=os.getpid(), birth="another-boot:1")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no process count as down because it answers late."""
    monkeypatch.setattr("cluster.processes.supervisor._ADOPT_TIMEOUT_S", 120.0)


@dataclass
class Left(FakeLauncher):
    """A Launcher whose processes answer when the test lets them."""

    router_address: str
    answers: dict[str, "asyncio.Future[None]"] = field(default_factory=dict)
    """Futures by name: a result lets the process serve, an exception fails its start once."""

    def found(self) -> frozenset[str]:
        return frozenset(self.answers)

    async def start(self, spec: ProcessSpec) -> Life:
        if (answer := self.answers.pop(spec.name, None)) is not None:
            await answer
        address = self.router_address if spec.role is ProcessRole.ROUTER else f"{spec.name}.invalid:1"
        return Life(Ready(address=address, admin_address=address, metrics_port=0, pid=1))


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


async def supervise_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch, launcher: object, **sections: object) -> None:
    """Run the next life of a controller whose last one served."""
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    monkeypatch.setattr(wiring, "_choose_launcher", lambda *_, **__: (partial(make_plan, host=None), launcher))
    state = make_state(supervisor=DEAD)
    StateFile(run_dir).write(replace(state, ray_environment={"RAY_ADDRESS": "192.0.2.1:6379"}))
    config = make_config(launcher="ray", router={"port": 1}, **sections)
    await wiring.supervise(
        config, run_dir=run_dir, listener=SimpleNamespace(notify=lambda event: None), stopping=asyncio.Event()
    )


@dataclass
class Silent(Left):
    """A Launcher whose Ray does not tell what it runs."""

    def found(self) -> frozenset[str]:
        raise RuntimeError("GCS is away")


async def test_takeover_without_an_answer_of_ray_fails_and_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TakeoverFailed, match="GCS is away"):
        await supervise_again(tmp_path, monkeypatch, Silent("127.0.0.1:1"))

    state = StateFile(tmp_path).read()
    assert state is not None and state.phase is ClusterPhase.READY


async def test_takeover_with_a_port_that_is_taken_fails_and_stops_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Left("127.0.0.1:1", {"decode-0": asyncio.get_running_loop().create_future()})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        planner = {"mode": "advise", "metrics_port": taken.getsockname()[1]}
        with pytest.raises(TakeoverFailed, match=r"planner\.metrics_port: cannot listen"):
            await supervise_again(tmp_path, monkeypatch, left, planner=planner)

    assert StateFile(tmp_path).read() is not None
    assert set(left.answers) == {"decode-0"}, "it was not even started"


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
        assert cluster.state().phase is ClusterPhase.ADOPTING  # a life that dies now has a successor that adopts, too

        last.set_result(None)
        await router.until(lambda router: router.num_pushes > 0)

        assert [name for name, _, _ in router.workers] == ["prefill-0", "decode-0"]


async def test_adopted_worker_that_cannot_start_is_retried_and_ends_nothing(tmp_path: Path) -> None:
    async with taking_over(tmp_path, "decode-0") as (cluster, launcher):
        launcher.answers["decode-0"].set_exception(StartFailed("decode-0: its host is away"))

        await cluster.router.until(lambda router: len(router.workers) == 2)

        assert cluster.state().phase is ClusterPhase.READY
        assert cluster.process("decode-0").last_exit == "decode-0: its host is away"


# Attempts that fail.


class Attempts:
    """Attempts that fail as often as they are told."""

    def __init__(self, run_dir: Path, *failures: Exception, phase: ClusterPhase = ClusterPhase.READY) -> None:
        self.state_file = StateFile(run_dir)
        state = make_state(supervisor=DEAD)
        self.state_file.write(replace(state, phase=phase, ray_environment={"RAY_ADDRESS": "192.0.2.1:6379"}))
        self.failures = list(failures)
        self.stopping = asyncio.Event()
        self.reports: list[str] = []
        self.pauses: list[float] = []
        self.told: list[tuple[ClusterPhase, str, int]] = []
        """What state.json said in each pause: phase, trouble, pid of the controller."""
        self.stops_in_pause = 0

    async def attempt(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    async def pause(self, seconds: float, stopping: asyncio.Event) -> None:
        self.pauses.append(seconds)
        state = self.state_file.read()
        assert state is not None
        self.told.append((state.phase, state.trouble, state.supervisor.pid))
        if len(self.pauses) == self.stops_in_pause:
            stopping.set()

    async def run(self) -> None:
        await until_taken_over(
            self.attempt,
            state_file=self.state_file,
            report=self.reports.append,
            stopping=self.stopping,
            pause=self.pause,
        )


async def test_takeover_that_fails_is_tried_again_after_growing_pauses(tmp_path: Path) -> None:
    bench = Attempts(tmp_path, *(TakeoverFailed("GCS is away") for _ in range(7)))
    await bench.run()

    assert bench.pauses == [1, 2, 4, 8, 16, 30, 30]
    assert bench.reports[1] == "the controller does not supervise the processes: GCS is away; next attempt in 2 s"


async def test_state_tells_the_reason_while_the_controller_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Attempts(tmp_path, OSError("planner.metrics_port: 9300 is taken"))
    await bench.run()

    assert bench.told == [(ClusterPhase.ADOPTING, "planner.metrics_port: 9300 is taken", os.getpid())]
    assert "9300 is taken" in caplog.text


async def test_processes_that_are_to_be_stopped_are_never_adopted_instead(tmp_path: Path) -> None:
    bench = Attempts(tmp_path, RuntimeError("Ray is silent"), phase=ClusterPhase.STOPPING)
    await bench.run()

    assert [phase for phase, _, _ in bench.told] == [ClusterPhase.STOPPING]


async def test_stop_during_a_pause_turns_the_next_attempt_into_the_end(tmp_path: Path) -> None:
    bench = Attempts(tmp_path, *(TakeoverFailed("GCS is away") for _ in range(2)))
    bench.stops_in_pause = 1
    await bench.run()

    assert [phase for phase, _, _ in bench.told] == [ClusterPhase.ADOPTING, ClusterPhase.STOPPING]


@pytest.mark.parametrize("phase", [ClusterPhase.STARTING, None])
async def test_first_start_that_fails_is_not_repeated(tmp_path: Path, phase: ClusterPhase | None) -> None:
    bench = Attempts(tmp_path, OSError("disk full"), phase=phase or ClusterPhase.READY)
    if phase is None:
        bench.state_file.remove()
    with pytest.raises(OSError, match="disk full"):
        await bench.run()
    assert bench.pauses == []


async def test_takeover_is_repeated_even_if_the_run_folder_has_vanished(tmp_path: Path) -> None:
    bench = Attempts(tmp_path, TakeoverFailed("GCS is away"))
    bench.state_file.remove()

    async def pause(seconds: float, stopping: asyncio.Event) -> None:
        bench.pauses.append(seconds)

    bench.pause = pause  # type: ignore[method-assign]
    await bench.run()
    assert bench.pauses == [1]


async def test_pause_ends_when_the_cluster_is_to_be_stopped() -> None:
    stopping = asyncio.Event()
    pausing = asyncio.create_task(pause_unless(3600.0, stopping))
    await asyncio.sleep(0)
    stopping.set()
    async with asyncio.timeout(60):
        await pausing

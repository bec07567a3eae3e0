"""The supervisor with fake processes and a scripted router: restarts, pauses, membership, stopping, failing."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.processes.launch_local import LocalLauncher
from cluster.processes.launcher import StartFailed
from cluster.processes.life import Life, ProcessPhase, Standing, restart_delay_s
from cluster.processes.plan import ProcessRole
from cluster.processes.state import ClusterPhase, ClusterState, StateFile
from common.lifecycle import IllegalTransition
from kvrelay.v1.worker_pb2 import WORKER_ROLE_DECODE, WORKER_ROLE_PREFILL
from tests.cluster.supervised import make_cluster, running_cluster
from tests.cluster.support import make_config, make_spec
from tests.e2e.harness import until

_MEMBERS = [
    ("prefill-0", WORKER_ROLE_PREFILL, "prefill-0.invalid:1"),
    ("decode-0", WORKER_ROLE_DECODE, "decode-0.invalid:1"),
]


async def test_run_pushes_every_worker_and_then_is_ready(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        assert cluster.router.workers == _MEMBERS
        state = cluster.state()
        assert state.phase is ClusterPhase.READY
        assert state.supervisor.pid == os.getpid()
        assert {each.name: each.phase for each in state.processes} == {
            "router-0": ProcessPhase.READY,
            "prefill-0": ProcessPhase.READY,
            "decode-0": ProcessPhase.READY,
        }
        assert sorted(report.split()[0] for report in cluster.reports if " is up " in report) == [
            "decode-0",
            "prefill-0",
            "router-0",
        ]


async def test_start_says_that_the_pages_hold_less_than_the_model_takes(tmp_path: Path) -> None:
    async with make_cluster(tmp_path) as cluster, asyncio.TaskGroup() as tasks:
        cluster.router.shortage = "prompt and answer may have 64 tokens"
        tasks.create_task(cluster.run())
        async with asyncio.timeout(60):
            await cluster.ready.wait()
        assert cluster.reports[-1] == cluster.router.shortage
        cluster.stopping.set()


async def test_slow_start_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.processes.supervisor._REMIND_S", 0.01)
    async with running_cluster(tmp_path) as cluster:
        assert any(report.startswith("waiting for ") and "decode-0" in report for report in cluster.reports)


async def test_worker_killed_is_taken_out_restarted_and_put_back(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        before = cluster.process("decode-0")
        assert before.identity is not None

        before.identity.signal(signal.SIGKILL)
        await cluster.router.until(lambda router: router.workers == _MEMBERS[:1])
        await cluster.router.until(lambda router: router.workers == _MEMBERS)

        after = cluster.process("decode-0")
        assert after.identity not in (None, before.identity)
        assert (after.num_restarts, after.last_exit) == (1, "killed by SIGKILL")
        assert cluster.process("prefill-0").num_restarts == 0


async def test_router_tells_a_pool_of_none_from_one_whose_worker_is_down(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        (prefill,) = cluster.supervisor.workforce.workers(ProcessRole.PREFILL)
        identity = cluster.process("prefill-0").identity
        assert identity is not None
        identity.signal(signal.SIGKILL)
        await cluster.router.until(lambda router: router.workers == _MEMBERS[1:])
        assert not cluster.router.is_without_prefill

        await cluster.router.until(lambda router: router.workers == _MEMBERS)
        await cluster.supervisor.workforce.remove_worker(prefill)
        await cluster.router.until(lambda router: router.is_without_prefill)
        assert cluster.router.workers == _MEMBERS[1:]


async def test_worker_that_keeps_dying_is_started_again_and_again(tmp_path: Path) -> None:
    async with make_cluster(tmp_path, decode_0=["--die-after-ready"]) as cluster, asyncio.TaskGroup() as tasks:
        tasks.create_task(cluster.run())
        await cluster.router.until(
            lambda router: router.num_pushes > 0 and cluster.process("decode-0").num_restarts >= 3
        )
        assert cluster.process("decode-0").last_exit == "terminated"
        cluster.stopping.set()


async def test_restarted_router_is_told_its_workers_again(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        cluster.router.workers.clear()
        router = cluster.process("router-0").identity
        assert router is not None
        router.signal(signal.SIGKILL)

        await cluster.router.until(lambda _: cluster.process("router-0").num_restarts == 1)
        await cluster.router.until(lambda router: router.workers == _MEMBERS)


async def test_new_worker_is_kept_even_if_the_router_refuses_another_one(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        cluster.router.unused = {"decode-0"}
        await cluster.supervisor.workforce.add_worker(make_spec("decode-1"))
        assert cluster.process("decode-1").phase is ProcessPhase.READY


async def test_worker_that_is_down_is_drained_at_once(tmp_path: Path) -> None:
    async with make_cluster(tmp_path) as cluster:  # nothing is started
        (away,) = cluster.supervisor.workforce.workers(ProcessRole.DECODE)
        async with asyncio.timeout(60):
            assert await cluster.supervisor.workforce.drain_worker(away, grace_s=3600.0) == 0


async def test_cancelled_start_of_a_worker_leaves_no_process(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, decode_1=["--never-ready"]) as cluster:
        workforce, before = cluster.supervisor.workforce, set(psutil.Process().children())
        adding = asyncio.create_task(workforce.add_worker(make_spec("decode-1")))
        while not (started := set(psutil.Process().children()) - before):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding

        assert [each.name for each in workforce.workers(ProcessRole.DECODE)] == ["decode-0"]
        assert not any(process.is_running() for process in started)


async def test_scale_that_waits_for_room_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.processes.workforce._LOOK_S", 0.001)
    rooms = iter(["", "4 free CPUs", "4 free CPUs", "2 free CPUs"])
    monkeypatch.setattr(LocalLauncher, "missing_room_of", lambda self, spec: next(rooms, "1 free CPU"))
    reports: asyncio.Queue[str] = asyncio.Queue()
    async with running_cluster(tmp_path, decode_1=["--never-ready"]) as cluster:
        adding = asyncio.create_task(cluster.supervisor.workforce.add_worker(make_spec("decode-1"), reports.put_nowait))
        told = [await reports.get() for _ in range(3)]
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding

    assert told == [f"decode-1 waits for {missing}" for missing in ("4 free CPUs", "2 free CPUs", "1 free CPU")]


async def test_worker_whose_drain_is_cancelled_gets_requests_again(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        workforce = cluster.supervisor.workforce
        (worker,) = workforce.workers(ProcessRole.DECODE)
        cluster.router.num_users = {"decode-0": 1}
        draining = asyncio.create_task(workforce.drain_worker(worker, grace_s=3600.0))
        await cluster.router.until(lambda router: "decode-0" in router.draining)
        draining.cancel()
        await asyncio.wait((draining,))
        workforce.keep_worker(worker)
        await cluster.router.until(lambda router: not router.draining)
        assert cluster.router.workers == _MEMBERS


async def test_changes_end_before_any_process_is_stopped(tmp_path: Path) -> None:
    alive: list[bool] = []

    async def end_changes() -> None:
        alive.append(all(each.phase is ProcessPhase.READY for each in cluster.state().processes))
        assert cluster.state().phase is ClusterPhase.STOPPING

    async with make_cluster(tmp_path) as cluster, asyncio.TaskGroup() as tasks:
        run = cluster.supervisor.run(cluster.stopping, on_ready=cluster.stopping.set, end_changes=end_changes)
        tasks.create_task(run)

    assert alive == [True]


async def test_no_process_is_started_once_the_cluster_stops(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        workforce = cluster.supervisor.workforce
    with pytest.raises(StartFailed, match="being stopped"):
        await workforce.add_worker(make_spec("decode-1"))


async def test_cluster_goes_on_when_its_state_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(tmp_path) as cluster:
        identity = cluster.process("decode-0").identity
        assert identity is not None

        def full(_file: StateFile, _state: ClusterState) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(StateFile, "write", full)
        identity.signal(signal.SIGKILL)
        await cluster.router.until(lambda router: router.workers == _MEMBERS[:1])
        await cluster.router.until(lambda router: router.workers == _MEMBERS)


async def test_membership_is_repeated_without_a_change(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        seen = cluster.router.num_pushes

        await cluster.router.until(lambda router: router.num_pushes >= seen + 2)


async def test_stop_leaves_no_process(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, prefill_0=["--ignore-sigterm"]) as cluster:
        identities = [each.identity for each in cluster.state().processes]

    assert len(identities) == 3
    assert not any(identity is None or identity.is_alive() for identity in identities)
    assert {each.phase for each in cluster.state().processes} == {ProcessPhase.STOPPED}


async def test_stop_before_ready_leaves_no_process(tmp_path: Path) -> None:
    others = {child.pid for child in psutil.Process().children(recursive=True)}  # of earlier tests
    async with make_cluster(tmp_path, decode_0=["--never-ready"]) as cluster, asyncio.TaskGroup() as tasks:
        tasks.create_task(cluster.run())
        await cluster.router.until(lambda router: router.workers == _MEMBERS[:1])
        helpers = [helper for helper in cluster.state().helpers if helper.pid not in others]
        cluster.stopping.set()

    async def are_gone() -> bool:
        return not any(helper.is_alive() for helper in helpers)

    await until(are_gone, timeout_s=30, what="the helpers have ended")
    assert cluster.state().phase is ClusterPhase.STOPPING


async def test_first_start_that_fails_stops_everything_and_tells_why(tmp_path: Path) -> None:
    async with make_cluster(tmp_path, decode_0=["--fail", "out of memory"]) as cluster:
        with pytest.raises(StartFailed, match=r"decode-0: exited with code 3 before it was ready\n.*\nout of memory"):
            await cluster.run()

        state = cluster.state()
        assert state.phase is ClusterPhase.FAILED
        assert {each.phase for each in state.processes} <= {ProcessPhase.STOPPED}


async def test_router_is_told_the_workers_of_its_own_generation_only(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        workforce = cluster.supervisor.workforce
        other = make_config(model={"engine": "fake", "max_model_len": 64}, router={"count": 1})
        new = replace(make_spec("decode-1"), config=other)
        await workforce.add_worker(new)
        seen = cluster.router.num_pushes
        await cluster.router.until(lambda router: router.num_pushes >= seen + 2)
        assert cluster.router.workers == _MEMBERS

        (router,) = workforce.workers(ProcessRole.ROUTER)
        await workforce.remove_worker(router)
        await workforce.add_worker(replace(router.spec, config=other))
        assert cluster.router.workers == [("decode-1", WORKER_ROLE_DECODE, "decode-1.invalid:1")]

        # No router is asked about requests on a worker that no router knows.
        (old,) = (process for process in workforce.workers(ProcessRole.DECODE) if process.spec.name == "decode-0")
        assert await workforce.drain_worker(old, grace_s=60.0) == 0


@pytest.mark.parametrize(("num_short_lives", "delay_s"), [(0, 0), (1, 0), (2, 0.25), (3, 0.5), (6, 4), (7, 5), (99, 5)])
def test_restart_delay_is_zero_once_then_doubles_up_to_five_seconds(num_short_lives: int, delay_s: float) -> None:
    assert restart_delay_s(num_short_lives) == delay_s


def test_life_that_dies_early_waits_longer_each_time_and_not_after_a_long_one() -> None:
    life = Life()
    delays = []
    for lived_s in (1.0, 1.0, 1.0, 60.0):
        life.enter(ProcessPhase.STARTING)
        life.enter(ProcessPhase.READY)
        delays.append(life.die("killed\nby a test", lived_s=lived_s))

    assert delays == [0.0, 0.25, 0.5, 0.0]
    assert (life.phase, life.num_lives, life.last_exit) == (ProcessPhase.WAITING, 4, "killed")


def test_stopped_process_never_starts_again() -> None:
    life = Life()
    life.enter(ProcessPhase.STOPPED)

    with pytest.raises(IllegalTransition, match="stopped -> starting"):
        life.enter(ProcessPhase.STARTING)


@pytest.mark.parametrize("standing", list(Standing))
def test_only_members_are_known_to_routers_and_none_joins_twice(standing: Standing) -> None:
    life = Life(standing=standing)

    assert life.is_known_to_routers is (standing in (Standing.MEMBER, Standing.DRAINING))
    if standing is not Standing.JOINING:
        with pytest.raises(IllegalTransition):
            life.stand(Standing.JOINING)

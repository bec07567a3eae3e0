"""Whole runs: real generator processes against real servers in this process."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.errors import Unreachable
from common.slo import Slo
from measure.load.records import Outcome, PoolSample, RequestRecord
from measure.load.run import run_load
from measure.load.spec import LoadSpec, LoadTestFailed
from measure.load.store import read_run
from measure.load.targets.interface import TargetInfo, TargetSpec
from tests.e2e.in_process import running_system
from tests.measure.load.sse_server import ScriptedServer, serving
from tests.measure.load.workloads import closed_loop, open_loop, workload


def generators() -> list[psutil.Process]:
    """Return the generator processes of this process, oldest first."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "measure.load.process" in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda child: child.pid)


class Watching:
    """An observer that records everything."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.samples: list[PoolSample] = []

    def started(self, spec: LoadSpec, target: TargetInfo) -> None:
        pass

    def record(self, request: RequestRecord) -> None:
        self.records.append(request)

    def sample(self, sample: PoolSample) -> None:
        self.samples.append(sample)


async def test_run_against_our_grpc_api_measures_every_turn_of_both_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.doors.service.STATUS_TIMEOUT_S", 60.0)  # a sample has every worker
    streams = (open_loop([0.0, 0.05, 0.1], turns=2), closed_loop(4, 2, first_index=10))
    observer = Watching()
    async with running_system() as system:
        spec = LoadSpec(
            name="small",
            target=TargetSpec(url=system.address),
            workload=workload(*streams),
            slo=Slo(ttft_s=1e-6, tpot_s=9.0),
            states_objectives=False,
        )
        run = await run_load(spec, observer)
        await system.until_idle()

    asked = [(session, turn) for session in range(3) for turn in range(2)] + [(session, 0) for session in range(10, 14)]
    assert sorted((r.session, r.turn) for r in run.requests) == asked
    assert {r.outcome for r in run.requests} == {Outcome.COMPLETED}
    assert all(r.num_output_tokens == r.num_wanted_tokens for r in run.requests)
    assert sorted(r.session for r in observer.records) == sorted(r.session for r in run.requests)
    assert run.info.num_workers == {"prefill": 1, "decode": 1}
    assert run.samples and {worker.role for worker in run.samples[0].workers} == {"prefill", "decode"}
    later = [r for r in run.requests if r.turn == 1]
    assert all(r.num_prompt_tokens == 4 + 2 + 4 for r in later)  # prompt, answer, prompt
    assert all(r.server.request_id and r.server.decode_worker for r in run.requests)
    assert run.info.told_slo is None
    assert any("was not told" in note for note in run.info.notes)


async def test_run_against_our_http_api_gets_server_reports_and_continues_answers() -> None:
    async with running_system(router={"http_port": 0}) as system:
        spec = LoadSpec(
            name="http",
            target=TargetSpec(url=f"http://127.0.0.1:{system.router.http_port}/v1"),
            workload=workload(open_loop([0.0, 0.05], turns=2)),
            slo=Slo(ttft_s=60.0, tpot_s=10.0),
        )
        run = await run_load(spec)
        await system.until_idle()
    assert [r.error for r in run.requests] == [""] * 4
    assert (run.info.told_slo, run.info.notes) == (spec.slo, ())
    assert all(r.num_output_tokens == r.num_wanted_tokens for r in run.requests)
    assert all(r.num_prompt_tokens == 4 + 2 + 4 for r in run.requests if r.turn == 1)
    assert all(r.server.decode_worker == "d0" and r.server.queue_s is not None for r in run.requests)
    assert run.samples[0].workers == ()  # the router reports only its queue


def target_of(server: ScriptedServer) -> TargetSpec:
    return TargetSpec(url=server.url)


async def test_stop_cancels_running_requests_and_keeps_the_records() -> None:
    server = ScriptedServer(hold=asyncio.Event())
    stop = asyncio.Event()

    async with serving(server):
        spec = LoadSpec(
            name="stopped", target=target_of(server), workload=workload(open_loop([0.0, 3600.0]), duration_s=7200.0)
        )
        running = asyncio.ensure_future(run_load(spec, stop=stop))
        await server.began.wait()
        stop.set()
        async with asyncio.timeout(60):
            run = await running
            await server.client_left.wait()
    assert [(r.session, r.outcome) for r in run.requests] == [(0, Outcome.CANCELLED)]
    assert run.info.notes[-1] == "ended early by its user; 1 requests were cancelled"
    assert generators() == []


async def test_cancelled_run_leaves_no_process_and_reports_cancelled_requests() -> None:
    server, observer = ScriptedServer(hold=asyncio.Event()), Watching()
    async with serving(server):
        spec = LoadSpec(name="cancelled", target=target_of(server), workload=workload(open_loop([0.0])))
        running = asyncio.ensure_future(run_load(spec, observer))
        await server.began.wait()
        running.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await running
            await server.client_left.wait()
    assert [r.outcome for r in observer.records] == [Outcome.CANCELLED]
    assert generators() == []


async def test_generator_process_that_dies_fails_the_run_and_keeps_the_records() -> None:
    server = ScriptedServer(hold=asyncio.Event(), num_awaited=2)  # one of each process
    async with serving(server):
        spec = LoadSpec(name="dies", target=target_of(server), workload=workload(open_loop([0.0, 0.0])), processes=2)
        running = asyncio.ensure_future(run_load(spec))
        await server.began.wait()
        first, _second = generators()
        first.kill()
        async with asyncio.timeout(60):
            with pytest.raises(LoadTestFailed, match="generator process 0 was killed by signal 9") as caught:
                await running
    assert [r.outcome for r in caught.value.run.requests] == [Outcome.CANCELLED]  # of the other process
    assert generators() == []


async def test_session_that_outlasts_the_drain_is_cancelled_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    server, called_s = ScriptedServer(hold=asyncio.Event()), time.monotonic()

    class Patience:
        """A clock that goes only once the session's answer has begun: until then the load does not end."""

        def monotonic(self) -> float:
            return time.monotonic() if server.began.is_set() else called_s

    monkeypatch.setattr("measure.load.run.SystemClock", Patience)
    async with serving(server), asyncio.timeout(120):
        load = workload(open_loop([0.0]), duration_s=0.05)
        run = await run_load(LoadSpec(name="long", target=target_of(server), workload=load, drain_s=0.1))
    assert [r.outcome for r in run.requests] == [Outcome.CANCELLED]
    assert run.info.notes[-1].startswith("1 requests ran longer than 0.1 s after the load ended")


async def test_unreachable_target_is_reported_before_any_process_starts() -> None:
    with pytest.raises(Unreachable):
        await run_load(
            LoadSpec(name="unreachable", target=TargetSpec(url="127.0.0.1:1"), workload=workload(open_loop([0.0])))
        )
    assert generators() == []


async def test_observer_that_fails_ends_the_run_with_its_error() -> None:
    class Full(Watching):
        def record(self, request: RequestRecord) -> None:
            raise OSError("disk full")

    async with serving(ScriptedServer()) as server, asyncio.timeout(120):
        spec = LoadSpec(name="full", target=target_of(server), workload=workload(open_loop([0.0, 9.0])))
        with pytest.raises(OSError, match="disk full"):
            await run_load(spec, Full())
    assert generators() == []


async def test_generator_that_is_kept_from_running_warns() -> None:
    server, stop = ScriptedServer(), asyncio.Event()
    load = workload(open_loop([0.1 * i for i in range(600)]), duration_s=60.0)
    async with serving(server), asyncio.timeout(120):
        throttling = asyncio.ensure_future(throttle_children(server.began, stop))
        run = await run_load(LoadSpec(name="throttled", target=target_of(server), workload=load), stop=stop)
        await throttling
    assert any("late" in warning for warning in run.info.generator.warnings)
    assert run.info.generator.num_late > 0


async def throttle_children(began: asyncio.Event, stop: asyncio.Event) -> None:
    """Stop the child for 150 ms out of 200, like an overloaded machine; then end the run."""
    await began.wait()
    (child,) = generators()
    try:
        for _ in range(4):
            child.suspend()
            await asyncio.sleep(0.15)
            child.resume()
            await asyncio.sleep(0.05)
    finally:
        child.resume()
        stop.set()


async def test_sigint_to_the_whole_group_ends_the_run_in_order(tmp_path: Path) -> None:
    server = ScriptedServer(hold=asyncio.Event())
    async with serving(server), asyncio.timeout(120):
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "tests.measure.load.one_run", server.url, str(tmp_path / "run")],
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"started\n"
            await server.began.wait()
            left = psutil.Process(process.pid).children()
            os.killpg(process.pid, signal.SIGINT)  # like a terminal
            assert await process.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    assert len(left) == 2
    assert not any(child.is_running() for child in left)
    run = read_run(tmp_path / "run")
    assert run.requests
    assert {r.outcome for r in run.requests} == {Outcome.CANCELLED}

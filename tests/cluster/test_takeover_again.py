"""A controller that cannot take the processes of an earlier one over tries again, and says so."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.processes.state import ClusterPhase, StateFile
from cluster.takeover import TakeoverFailed, pause_unless, until_taken_over
from common.process import ProcessIdentity
from tests.cluster.test_state import make_state

_DEAD = ProcessIdentity(pid=os.getpid(), birth="another-boot:1")


class Bench:
    """Attempts that fail as often as they are told."""

    def __init__(self, run_dir: Path, *failures: Exception, phase: ClusterPhase = ClusterPhase.READY) -> None:
        self.state_file = StateFile(run_dir)
        state = make_state(supervisor=_DEAD)
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
    bench = Bench(tmp_path, *(TakeoverFailed("GCS is away") for _ in range(7)))
    await bench.run()

    assert bench.pauses == [1, 2, 4, 8, 16, 30, 30]
    assert bench.reports[1] == "the controller does not supervise the processes: GCS is away; next attempt in 2 s"


async def test_state_tells_the_reason_while_the_controller_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, OSError("planner.metrics_port: 9300 is taken"))
    await bench.run()

    assert bench.told == [(ClusterPhase.ADOPTING, "planner.metrics_port: 9300 is taken", os.getpid())]
    assert "9300 is taken" in caplog.text


async def test_processes_that_are_to_be_stopped_are_never_adopted_instead(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RuntimeError("Ray is silent"), phase=ClusterPhase.STOPPING)
    await bench.run()

    assert [phase for phase, _, _ in bench.told] == [ClusterPhase.STOPPING]


async def test_stop_during_a_pause_turns_the_next_attempt_into_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *(TakeoverFailed("GCS is away") for _ in range(2)))
    bench.stops_in_pause = 1
    await bench.run()

    assert [phase for phase, _, _ in bench.told] == [ClusterPhase.ADOPTING, ClusterPhase.STOPPING]


@pytest.mark.parametrize("phase", [ClusterPhase.STARTING, None])
async def test_first_start_that_fails_is_not_repeated(tmp_path: Path, phase: ClusterPhase | None) -> None:
    bench = Bench(tmp_path, OSError("disk full"), phase=phase or ClusterPhase.READY)
    if phase is None:
        bench.state_file.remove()
    with pytest.raises(OSError, match="disk full"):
        await bench.run()
    assert bench.pauses == []


async def test_takeover_is_repeated_even_if_the_run_folder_has_vanished(tmp_path: Path) -> None:
    bench = Bench(tmp_path, TakeoverFailed("GCS is away"))
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

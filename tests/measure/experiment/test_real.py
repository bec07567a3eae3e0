"""Experiments with real processes, from the command line: the fake engine's cells take seconds."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner, Result

from cli.main import app
from common.errors import EngineFault
from common.trust.identity import Role
from measure.experiment.points import Cell, Source
from measure.experiment.real import ask_worker
from measure.experiment.store import Store
from measure.load.store import read_run
from measure.simulate.timing import read_timing
from tests.router.fake_worker import DECODE, FakeWorker
from tests.trust import reach_as

WHOLE = {"name": "whole", "workers": 1, "threads": 2}
BROKEN = {"name": "broken", "workers": 1, "serving": {"model.id": "/nowhere", "model.engine": "torch"}}
EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "serving": {
        "model": {"engine": "fake", "fake_step_ms": 1},
        "pools": {"prefill": {"num_blocks": 256}},
        "router": {"local_prefill_max_tokens": 0},
    },
    "shapes": [{"prefill": 1, "decode": 1, "threads": 1}, WHOLE],
    "workload": {
        "streams": [
            {
                "name": "chats",
                "arrivals": {"rate": 2},
                "turns": 2,
                "think_s": 0.05,
                "first_tokens": 40,
                "turn_tokens": 20,
                "output_tokens": 8,
            },
            {"name": "documents", "arrivals": {"rate": 1}, "first_tokens": 200, "output_tokens": 4},
        ]
    },
    "grid": {"pools.num_blocks": [256]},
    "loads": [20],
    "repeats": 1,
    "duration_s": 2.0,
    "warm_up_s": 0.2,
    "slo": {"ttft_s": 60, "tpot_s": 20},  # every answer is good, also on a busy machine
}
ARMS = ("1P1D num_blocks=256", "whole num_blocks=256")


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes, sort_keys=False), encoding="utf-8")
    return path


def arguments(path: Path) -> Sequence[str]:
    return ("experiment", "run", str(path), "--out", str(path.parent / "out"))


def command(path: Path) -> Sequence[str]:
    return (sys.executable, "-P", "-m", "kvrelay", *arguments(path))


def run(path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(path), capture_output=True, text=True, timeout=240, check=False)


def run_here(path: Path) -> Result:
    """Run the command in this process, where it is to start no cluster."""
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, arguments(path), prog_name="kvrelay")


def processes_of(tmp_path: Path) -> list[str]:
    """Return the command lines that name a folder."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(tmp_path) in line]


def shared_memory() -> set[str]:
    """Return the names of our segments, where the system shows them."""
    return {path.name for path in Path("/dev/shm").glob("*kvrelay*")}


def asked(store: Store, arm: str) -> tuple[tuple[int, int, int], ...]:
    """Return the requests of an arm's run: session, turn and length of the answer that was asked for."""
    requests = read_run(store.folder(Source.REAL, Cell(arm=arm, load=20.0, repeat=0))).requests
    return tuple(sorted((each.session, each.turn, each.num_wanted_tokens) for each in requests))


def test_experiment_measures_arms_notes_those_that_fail_and_does_nothing_twice(tmp_path: Path) -> None:
    external = [{"name": "other", "url": "127.0.0.1:1"}]
    path, shared_before = write(tmp_path, shapes=[BROKEN, *EXPERIMENT["shapes"]], external=external), shared_memory()
    first = run(path)
    assert first.returncode == 1, first.stderr
    assert "4 runs, about" in first.stderr
    assert "p99" in first.stdout

    store = Store(tmp_path / "out")
    failures = list(store.failures())
    assert len(failures) == 2
    assert "/nowhere" in failures[0]
    assert "it does not answer" in failures[1]
    assert all(failure in first.stderr for failure in failures)
    points = {point.arm.name: point for point in store.points()}
    assert set(points) == set(ARMS)
    for name, point in points.items():
        assert list(point.kinds) == ["all", "chats", "documents"]
        assert point.overall.good_share == 1.0
        assert point.overall.num_requests > 5
        assert point.decode_busy is not None
        assert 0 < point.decode_busy <= 1
        folder = store.folder(Source.REAL, Cell(arm=name, load=20.0, repeat=0))
        assert len(read_run(folder).requests) >= point.overall.num_requests
        assert (folder / "report.html").stat().st_size > 1000
        timing, kv = read_timing(store.arm_folder(name) / "timing.json")
        assert timing.decode.num_samples > 0
        assert kv.bytes_per_token > 0
    split, whole = (points[name] for name in ARMS)
    assert (split.transfer_bytes > 0, whole.transfer_bytes) == (True, 0)
    assert (split.prefill_busy is None, whole.prefill_busy is None) == (False, True)
    # Both were asked the same; which later turns the window still counts depends on how long answers took.
    assert len({asked(store, name) for name in ARMS}) == 1

    again = run_here(write(tmp_path))
    assert again.exit_code == 0, again.stderr
    assert "0 runs; 2 are kept from earlier" in again.stderr
    assert processes_of(tmp_path) == []
    assert shared_memory() <= shared_before

    other = run_here(write(tmp_path, seed=1))
    assert other.exit_code == 1
    assert "holds results of other settings (real seed differ)" in other.stderr


def test_interrupt_stops_the_cluster_drops_the_cell_and_leaves_no_process(tmp_path: Path) -> None:
    path = write(tmp_path, shapes=[WHOLE], duration_s=60.0)
    with subprocess.Popen(command(path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "whole num_blocks=256 at 20/s" in line:  # its cell has begun
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "stopped" in rest
    assert processes_of(tmp_path) == []
    assert list((tmp_path / "out" / "real").iterdir()) == []
    assert not list((tmp_path / "out" / "arms").glob("*/state.json"))


async def test_worker_without_timing_is_a_fault_that_names_it() -> None:
    worker = FakeWorker("d0", DECODE)
    await worker.start()
    try:
        with pytest.raises(EngineFault, match=f"{worker.address} reports no timing"):
            await ask_worker(worker.address, reach_as(Role.OPERATOR).worker)
    finally:
        await worker.die()

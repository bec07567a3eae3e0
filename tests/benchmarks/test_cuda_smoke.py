"""The GPU measurements run on a CPU with tiny shapes: what is left for the GPU is its speed."""

import os
import select
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cuda import (
    arms,
    card,
    checks,
    handoff,
    kernels,
    numerics,
    preflight,
    profile,
    service,
    speed,
    throughput,
)
from benchmarks.cuda.report import Report
from engine import loading
from engine.cuda.loading import load_cuda_executor
from engine.ops.triton_kernels import prefill_attention
from engine.ops.triton_kernels.decode_attention import decode_attention
from engine.options import ModelDescription
from tests.caches import empty_cache

pytestmark = pytest.mark.usefixtures("rates_measured_once")

Main = Callable[[list[str] | None], int]

REPOSITORY = Path(__file__).parents[2]
SMOKE = ["--smoke", "--device", "cpu", "--budget-s", "3600"]
"""A smoke run that a busy machine does not end."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _settings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("KVRELAY_CACHE", str(cache))


@pytest.mark.parametrize(
    ("main", "name", "arguments", "num_readings"),
    [
        (preflight.main, "preflight", [], 1),
        (card.main, "card", [], 2),
        (numerics.main, "numerics", [], 9),
        (profile.main, "profile", [], 4),
        (checks.main, "checks-oracle", ["--only", "oracle"], 2),
        (checks.main, "checks-tests", ["--only", "tests"], 1),
        (speed.main, "speed-tiny-bf16", ["--model", "tiny", "--sampling"], 9),
        (speed.main, "speed-tiny-llama-fp32", ["--model", "tiny-llama", "--format", "fp32"], 3),
        (throughput.main, "throughput", [], 2),
        (handoff.main, "handoff", [], 2),
        (kernels.main, "kernels", [], 26),
        pytest.param(service.main, "service", [], 7, marks=pytest.mark.e2e),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_part_when_run_on_a_cpu_measures_every_case(
    main: Main, name: str, arguments: list[str], num_readings: int, tmp_path: Path
) -> None:
    assert main([*arguments, *SMOKE, "--out", str(tmp_path)]) == 0
    report = Report.load(tmp_path / f"{name}.json")
    assert len(report.readings) >= num_readings
    assert all(reading.value > 0 for reading in report.readings)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [(checks.main, ["--only", "oracle"]), (speed.main, ["--model", "tiny"]), (throughput.main, [])],
    ids=["checks", "speed", "throughput"],
)
def test_part_when_steps_overlap_as_on_a_gpu_measures_every_case(
    main: Main, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        loading, "load_executor", lambda options: load_cuda_executor(ModelDescription.read(options), options)
    )
    assert main([*arguments, *SMOKE, "--out", str(tmp_path)]) == 0


def test_checks_when_an_answer_differs_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "initializer_range", lambda _config: 0.1)
    status = checks.main(["--only", "oracle", *SMOKE, "--out", str(tmp_path)])
    assert status == 1
    failures = Report.load(tmp_path / "checks-oracle.json").failures
    assert [failure.case for failure in failures] == ["oracle, tiny", "oracle, tiny-llama"]


def _failures(folder: Path, part: str) -> list[str]:
    return [f"{failure.case}: {failure.reason}" for failure in Report.load(folder / f"{part}.json").failures]


@pytest.fixture
def _one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_PAGES", {"bf16": torch.bfloat16})
    sizes = replace(numerics.SMOKE, attention=("tiny",), layers=(), batches={"mixed": [(20, 1), (0, 3)]})
    monkeypatch.setattr(numerics, "SMOKE", sizes)


@pytest.mark.usefixtures("_one_case")
def test_numerics_when_a_kernel_leaves_memory_unwritten_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "decode_attention", lambda *_: None)
    assert numerics.main([*SMOKE, "--out", str(tmp_path)]) == 1
    (failure,) = _failures(tmp_path, "numerics")
    assert "relative error nan" in failure
    assert "with 64 rows and 4 warps: fails too" in failure


@pytest.mark.usefixtures("_one_case")
def test_numerics_when_smaller_tiles_are_right_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = prefill_attention.prefill_attention

    def wrong(output: torch.Tensor, *inputs: Any) -> None:
        right(output, *inputs)
        if prefill_attention.prefill_tiles(torch.bfloat16, 64).rows != 64:
            output.mul_(1.5)

    monkeypatch.setattr(prefill_attention, "prefill_attention", wrong)
    assert numerics.main([*SMOKE, "--out", str(tmp_path)]) == 1
    (failure,) = _failures(tmp_path, "numerics")
    assert "relative error" in failure
    assert "with 64 rows and 4 warps: passes" in failure


@pytest.mark.usefixtures("_one_case")
def test_numerics_when_runs_differ_in_a_bit_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, num_runs = decode_attention, 0

    def unsteady(output: torch.Tensor, *inputs: Any) -> None:
        nonlocal num_runs
        num_runs += 1
        right(output, *inputs)
        output[0, 0, 0] *= 1 + num_runs / 128

    monkeypatch.setattr(numerics, "decode_attention", unsteady)
    assert numerics.main([*SMOKE, "--out", str(tmp_path)]) == 1
    assert "run 2 has other bits than the first" in _failures(tmp_path, "numerics")[0]


def test_throughput_when_the_other_arm_fails_keeps_our_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(throughput, "TransformersArm", fail)
    assert throughput.main([*SMOKE, "--out", str(tmp_path)]) == 1
    (reading,) = Report.load(tmp_path / "throughput.json").readings
    assert reading.unit == "tokens/s"


def test_tests_that_hang_are_ended_with_their_children_and_still_counted() -> None:
    hanging = """if True:
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("[gw0] [ 50%] PASSED tests/test_a.py::test_one[a b]", child.pid, flush=True)
        time.sleep(600)
    """
    lines, status = checks.stream([sys.executable, "-c", hanging], 10)
    assert status is None
    assert "PASSED tests/test_a.py::test_one[a b]" in lines[0]
    # SIGKILL takes effect later, and the process may stay a zombie: a descriptor of it tells when it has ended.
    with suppress(ProcessLookupError):  # it is gone
        child = os.pidfd_open(int(lines[0].split()[-1]))
        has_ended = bool(select.select([child], [], [], 30)[0])
        os.close(child)
        assert has_ended


def run_script(out: Path, *parts: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a smoke run of the script, and check that it fails."""
    done = subprocess.run(
        [REPOSITORY / "benchmarks" / "cuda_all.sh", "--smoke", *parts],
        env={**os.environ, "OUT": str(out), "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done


def test_script_when_one_part_fails_reports_it_and_goes_on(tmp_path: Path) -> None:
    no_folder, archive = tmp_path / "file" / "cache", tmp_path / "archive" / "all.tar.gz"
    no_folder.parent.touch()
    out, settings = tmp_path / "out", {"KVRELAY_CACHE": str(no_folder), "TOTAL_S": "3600", "ARCHIVE": str(archive)}
    done = run_script(out, "speed", "card", **settings)
    assert "FAILED speed-tiny-bf16, speed-tiny-bf16: ModelNotFound: cannot make random:tiny: cannot use" in done.stdout
    assert Report.load(out / "card.json").failures == []
    assert sorted(file.name for file in archive.parent.iterdir()) == ["all.tar.gz", "summary.md"]
    assert (archive.parent / "summary.md").read_text() == (out / "summary.md").read_text()
    with tarfile.open(archive) as packed:
        assert {"./card.json", "./summary.md", "./speed-tiny-bf16.json"} <= set(packed.getnames())


def test_script_when_no_time_is_left_fails_and_names_the_parts(tmp_path: Path) -> None:
    done = run_script(tmp_path / "out", TOTAL_S="0")
    for part in ("card", "numerics", "checks-oracle", "speed-tiny-bf16", "profile", "throughput", "service", "kernels"):
        assert f"FAILED {part}, all of it: it left no result" in done.stdout


def test_script_on_a_gpu_takes_parts_in_order_and_budgets_fit_its_time(tmp_path: Path) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    python.chmod(0o755)
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": str(python)}
    subprocess.run([REPOSITORY / "benchmarks" / "cuda_all.sh"], env=environment, check=True, capture_output=True)
    runs = [line.split() for line in calls.read_text().splitlines() if "--budget-s" in line]
    order = "preflight card numerics handoff checks speed profile speed kernels service checks speed speed throughput"
    assert [run[1].removeprefix("benchmarks.cuda.") for run in runs] == order.split()
    budgets_s = [int(run[run.index("--budget-s") + 1]) for run in runs]
    assert sum(budgets_s) <= 545

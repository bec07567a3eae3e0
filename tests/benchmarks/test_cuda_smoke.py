"""The GPU measurements run on a CPU with tiny shapes: what is left for the GPU is its speed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.cuda import arms, card, checks, handoff, kernels, preflight, service, speed, throughput
from benchmarks.cuda.report import Report
from engine import loading
from engine.cuda.loading import load_cuda_executor
from engine.options import ModelDescription
from tests.caches import empty_cache

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
        (card.main, "card", [], 2),
        (checks.main, "checks-oracle", ["--only", "oracle"], 2),
        (speed.main, "speed-tiny-bf16", ["--model", "tiny"], 3),
        (speed.main, "speed-tiny-llama-fp32", ["--model", "tiny-llama", "--format", "fp32"], 3),
        (throughput.main, "throughput", [], 1),
        (handoff.main, "handoff", [], 2),
        (kernels.main, "kernels", [], 24),
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


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return a Python without the preflight, which imports everything that the parts do."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = benchmarks.cuda.preflight ] || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def run_script(python: Path, out: Path, *parts: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a smoke run of the script, and check that it fails."""
    done = subprocess.run(
        [REPOSITORY / "benchmarks" / "cuda_all.sh", "--smoke", *parts],
        env={**os.environ, "OUT": str(out), "PYTHON": str(python), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done


def test_preflight_can_import_everything_that_the_parts_need() -> None:
    assert preflight.main() == 0


def test_script_when_one_part_fails_reports_it_and_goes_on(python: Path, tmp_path: Path) -> None:
    no_folder = python / "cache"
    done = run_script(python, tmp_path, "speed", "card", KVRELAY_CACHE=str(no_folder), TOTAL_S="3600")
    assert "FAILED speed-tiny-bf16, speed-tiny-bf16: ModelNotFound: cannot make random:tiny: cannot use" in done.stdout
    assert Report.load(tmp_path / "card.json").failures == []


def test_script_when_no_time_is_left_fails_and_names_the_parts(python: Path, tmp_path: Path) -> None:
    done = run_script(python, tmp_path / "out", TOTAL_S="0")
    for part in ("card", "checks-oracle", "speed-tiny-bf16", "throughput", "handoff", "service", "kernels"):
        assert f"FAILED {part}, all of it: it left no result" in done.stdout

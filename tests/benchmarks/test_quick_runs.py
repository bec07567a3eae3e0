"""Benchmarks of whole processes run at their smallest: the router's parts without peers, TLS without whole clusters."""

import json
import subprocess
import sys
from pathlib import Path


def test_router_benchmark_quick_measures_every_part_and_writes_it(tmp_path: Path) -> None:
    report = tmp_path / "router.json"
    command = [sys.executable, "-m", "benchmarks.router", "--quick", "--without-peers", "--json", str(report)]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = json.loads(report.read_text())
    assert {figure["part"] for figure in found["figures"]} == {"hashing", "index", "decision", "requests"}
    assert all(len(figure["rounds"]) == 2 for figure in found["figures"])
    assert all(value > 0 for figure in found["figures"] if "CPU" not in figure["unit"] for value in figure["rounds"])
    assert found["missing"] == {}


def test_tls_benchmark_quick_measures_both_arms_and_writes_them(tmp_path: Path) -> None:
    report = tmp_path / "tls.json"
    parts = ["tokens", "kv"]
    command = [sys.executable, "-m", "benchmarks.tls_cost", "--quick", "--parts", *parts, "--json", str(report)]
    subprocess.run(command, check=True, timeout=180, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = json.loads(report.read_text())
    assert {figure["part"] for figure in found["figures"]} == set(parts)
    paired = [figure for figure in found["figures"] if "both" not in figure]
    assert all(len(figure[arm]["rounds"]) == 1 for figure in paired for arm in ("off", "on"))
    kv = next(figure for figure in paired if figure["unit"] == "MiB per s")
    assert all(kv[arm]["median"] > 0 for arm in ("off", "on"))

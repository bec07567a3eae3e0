"""The router's benchmark runs: every part without its peers, at its smallest."""

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

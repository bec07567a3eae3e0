"""The benchmark of the router at its smallest, with a whole cluster of processes."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.router.__main__ import PARTS, main


def test_router_benchmark_quick_measures_every_part_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    arguments = ["--quick", "--only", "paced/http", "--tls", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    main()
    found = json.loads(report.read_text())
    assert {figure["part"] for figure in found["figures"]} == {*PARTS}
    assert all(len(figure["rounds"]) == 1 for figure in found["figures"])
    walls = [
        figure
        for figure in found["figures"]
        if figure["unit"].endswith(("per s", "p50")) and "CPU" not in figure["unit"]
    ]
    assert walls and all(value > 0 for figure in walls for value in figure["rounds"])
    costs = [figure for figure in found["figures"] if figure["unit"] == "worker us per token"]
    assert {(figure["case"], figure["arm"]) for figure in costs} == {("paced", "http"), ("paced, TLS", "http")}
    assert found["missing"] == {}

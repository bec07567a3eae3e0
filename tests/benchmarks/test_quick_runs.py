"""Benchmarks of whole processes run at their smallest: the router's parts without peers, TLS without whole clusters."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.router.__main__ import main as measure_router
from benchmarks.tls_cost.__main__ import main as measure_tls


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return what runs a benchmark with arguments and reads its report."""

    def run(main: Callable[[], None], *arguments: str) -> dict[str, Any]:
        report = tmp_path / "report.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", *arguments, "--json", str(report)])
        main()
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    return run


def test_router_benchmark_quick_measures_every_part_and_writes_it(run: Callable[..., dict[str, Any]]) -> None:
    found = run(measure_router, "--without-peers")
    assert {figure["part"] for figure in found["figures"]} == {"hashing", "index", "decision", "full", "requests"}
    assert all(len(figure["rounds"]) == 1 for figure in found["figures"])
    assert all(value > 0 for figure in found["figures"] if "CPU" not in figure["unit"] for value in figure["rounds"])
    assert found["missing"] == {}


def test_tls_benchmark_quick_measures_both_arms_and_writes_them(run: Callable[..., dict[str, Any]]) -> None:
    parts = ["tokens", "kv"]
    found = run(measure_tls, "--parts", *parts)
    assert {figure["part"] for figure in found["figures"]} == set(parts)
    paired = [figure for figure in found["figures"] if "both" not in figure]
    assert all(len(figure[arm]["rounds"]) == 1 for figure in paired for arm in ("off", "on"))
    kv = next(figure for figure in paired if figure["unit"] == "MiB per s")
    assert all(kv[arm]["median"] > 0 for arm in ("off", "on"))

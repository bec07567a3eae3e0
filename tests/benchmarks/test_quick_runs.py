"""Benchmarks of whole processes at their smallest: the router's parts, tokens with and without TLS."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.router.__main__ import main as measure_router
from benchmarks.token_path import main as measure_token_path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return what runs a benchmark with arguments and reads its report."""

    def run(main: Callable[[], None], *arguments: str) -> dict[str, Any]:
        report = tmp_path / "report.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--json", str(report)])
        main()
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    return run


def test_router_benchmark_quick_measures_every_part_and_writes_it(run: Callable[..., dict[str, Any]]) -> None:
    found = run(measure_router, "--quick")
    assert {figure["part"] for figure in found["figures"]} == {"hashing", "index", "decision", "full", "requests"}
    assert all(len(figure["rounds"]) == 1 for figure in found["figures"])
    assert all(value > 0 for figure in found["figures"] if "CPU" not in figure["unit"] for value in figure["rounds"])
    assert found["missing"] == {}


def test_tokens_are_measured_with_and_without_tls(run: Callable[..., dict[str, Any]]) -> None:
    found = run(measure_token_path, "--tls", "--only", "paced/http", "--repeats", "1", "--seconds", "0.3")
    costs = [figure for figure in found["figures"] if figure["unit"] in ("us per token", "worker us per token")]
    assert {(figure["case"], figure["arm"]) for figure in costs} == {("paced", "http"), ("paced, TLS", "http")}
    assert len(costs) == 4
    rates = [figure["median"] for figure in found["figures"] if figure["unit"] == "tokens per s"]
    assert len(rates) == 2 and all(rate > 0 for rate in rates)

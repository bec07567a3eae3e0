"""An experiment in virtual time from its file to its page."""

import html
import json
import multiprocessing
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli.experiment import experiment_app
from measure.experiment.points import LoadUnit, Source
from measure.experiment.prepare import Choices, prepare
from measure.experiment.report import findings_of, write_report
from measure.experiment.search import measure_side_by_side
from measure.experiment.spec import ExperimentError
from measure.experiment.store import Store
from tests.measure.experiment.builders import make_arm, served_up_to

FILE = """
name: tiny
workload:
  streams:
    - name: chats
      arrivals: {rate: 0.5}
      turns: 2
      think_s: 2
      first_tokens: 2000
      turn_tokens: 100
      output_tokens: 60
    - {name: documents, arrivals: {rate: 0.5}, first_tokens: "uniform:6000,9000", output_tokens: 20}
slo: {ttft_s: 2.0, tpot_s: 0.05}
serving:
  pools:
    prefill: {block_size: 64, num_blocks: 4000, max_step_tokens: 2048}
    decode: {block_size: 64, num_blocks: 4000, max_step_tokens: 2048}
shapes: [1P1D, 2 aggregated]
loads: [1, 4]
repeats: 2
duration_s: 4
warm_up_s: 1
simulate: {min_requests: 16}
capacity: {share: 0.9, precision: 0.5, repeats: 1, max_loads: 4}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(FILE)
    return path


def kvrelay_experiment(*arguments: str | Path) -> str:
    done = CliRunner().invoke(experiment_app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the finished grid."""
    folder = tmp_path_factory.mktemp("grid")
    file, out = folder / "tiny.yaml", folder / "out"
    file.write_text(FILE)
    kvrelay_experiment("run", file, "--simulate", "--out", out)
    return out


def test_simulated_grid_keeps_points_and_writes_a_page_of_findings_and_plots(grid: Path) -> None:
    points = list(Store(grid).points())
    assert [(point.arm.name, point.load, point.repeat, point.source) for point in points] == [
        (arm, load, repeat, Source.SIMULATED)
        for arm in ("1P1D", "2 aggregated")
        for load in (1.0, 4.0)
        for repeat in (0, 1)
    ]
    assert all(point.overall.num_requests >= 8 for point in points)
    page = (grid / "report.html").read_text()
    for text in (
        "Experiment tiny",
        "serves most for each worker: ",
        "What gives way first",
        "8 simulated runs of 2 arms",
        "TTFT ≤ 2 s (longer above 8,192 prompt tokens)",
        "First token, documents: p99",
        "KV moved per request",
    ):
        assert text in page
    assert not re.search(r'(src|href)="(https?:)?//', page)


def test_search_in_two_processes_finds_the_same_capacities_as_in_one(file: Path, tmp_path: Path) -> None:
    file.write_text(FILE.replace("max_loads: 4", "max_loads: 2"))
    for out, jobs in ((tmp_path / "one", "1"), (tmp_path / "two", "2")):
        kvrelay_experiment("run", file, "--simulate", "--find-capacity", "--jobs", jobs, "--out", out)
    stores = [Store(tmp_path / name) for name in ("one", "two")]
    assert list(stores[0].points()) == list(stores[1].points())
    assert {point.arm.name for point in stores[0].points()} == {"1P1D", "2 aggregated"}
    assert (tmp_path / "one" / "report.html").read_text() == (tmp_path / "two" / "report.html").read_text()


def test_error_of_one_arm_is_raised_at_once_and_ends_the_others(file: Path, tmp_path: Path) -> None:
    # The arm without an error has minutes of work, so that it ends only because it is ended.
    file.write_text(
        FILE.replace("decode: {block_size: 64, num_blocks: 4000", "decode: {block_size: 64, num_blocks: 5000").replace(
            "min_requests: 16", "min_requests: 40000"
        )
    )
    experiment = prepare(file, Choices(source=Source.SIMULATED))
    with pytest.raises(ExperimentError, match=r"1P1D: pools.prefill.num_blocks must be as in pools.decode"):
        measure_side_by_side(experiment, Store(tmp_path / "out"), num_jobs=2, is_search=False, report=print)
    for process in multiprocessing.active_children():
        process.join()
    assert not list(Store(tmp_path / "out").points())


def test_page_is_written_again_from_what_was_kept(grid: Path) -> None:
    page = grid / "report.html"
    before = page.read_text()
    page.unlink()
    kvrelay_experiment("report", grid)
    assert page.read_text() == before


def test_page_of_many_sizes_draws_the_best_arms_by_the_load_for_each_worker(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for size in (1, 2, 4, 8):
        arms = [(make_arm(size, size), 3.0 * size), (make_arm(0, 2 * size), 2.0 * size)]
        if size > 1:
            arms += [(make_arm(size - 1, size + 1), 1.5 * size), (make_arm(size + 1, size - 1), 2.5 * size)]
        for arm, capacity in arms:
            for point in served_up_to(capacity, arm, [capacity / 2, capacity, 1.5 * capacity]):
                store.keep(point.source, point.cell, point)
    page = write_report(store, findings_of(store)).read_text()
    assert "load for each worker, requests" in page
    thinned = "The best arms of each size are shown; the table has all."
    assert thinned in page
    assert "the split's gain is +50 %" in html.unescape(page)
    assert page.count('"name":"8P8D"') > 2
    assert '"name":"7P9D"' not in page
    assert re.search(r"<td[^>]*>7P9D</td>", page)  # in the tables it is


def test_page_of_many_arms_of_one_size_draws_the_best_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for capacity in range(1, 11):
        for point in served_up_to(
            capacity, make_arm(name=f"policy {capacity}"), [capacity / 2, capacity, 2 * capacity]
        ):
            store.keep(point.source, point.cell, point)
    page = write_report(store, findings_of(store)).read_text()
    assert [f'"name":"policy {n}"' in page for n in (1, 2, 3, 10)] == [False, False, True, True]
    assert "load, requests" in page


def test_recorded_sessions_are_an_experiment_whose_loads_are_sessions_at_a_time(tmp_path: Path) -> None:
    requests = [
        {"t": 0, "in": 900, "out": 40, "api_s": 1, "think_s": 0, "new": []},
        {"t": 5, "in": 1300, "out": 40, "api_s": 1, "think_s": 4, "like": [0, 14], "new": []},
    ]
    lines = [json.dumps({"session": f"s{number}", "requests": requests}) for number in range(6)]
    (tmp_path / "sessions.jsonl").write_text("\n".join(lines))
    raw = yaml.safe_load(FILE)
    raw["workload"] = {"streams": [{"name": "agents", "sessions": {"path": "sessions.jsonl"}, "concurrency": 1}]}
    raw |= {"loads": [1, 3], "repeats": 1, "duration_s": 600, "warm_up_s": 0, "stretch": 1.5}
    (tmp_path / "agents.yaml").write_text(yaml.safe_dump(raw))
    output = kvrelay_experiment("run", tmp_path / "agents.yaml", "--simulate", "--out", tmp_path / "out")
    points = list(Store(tmp_path / "out").points())
    assert [(point.arm.name, point.load) for point in points] == [
        (arm, load) for arm in ("1P1D", "2 aggregated") for load in (1.0, 3.0)
    ]
    for point in points:
        assert point.load_unit is LoadUnit.SESSIONS
        assert point.sessions is not None
        assert (point.sessions.num_sessions, point.sessions.num_good) == (6, 6)
        assert point.sessions.stretch_limit == 1.5
    assert "sessions at a time" in output
    assert "Interactivity and throughput" in (tmp_path / "out" / "report.html").read_text()

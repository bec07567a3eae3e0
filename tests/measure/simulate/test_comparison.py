import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from common.slo import Slo
from measure.simulate.comparison import (
    REQUESTS_FILE,
    CellResult,
    PolicyComparison,
    ReplayCell,
    ReplayError,
    ReplaySettings,
    replayed_trace,
)
from measure.simulate.report import write_report
from measure.simulate.store import OtherSettings, read_requests
from measure.workload.waves import SpeedStage, SpeedStages
from tests.measure.pages.test_page import check

SMALL = Path(__file__).parents[2] / "data" / "small.jsonl"
NUM_REQUESTS = 20


def make_settings(*, num_requests: int = NUM_REQUESTS, block_size: int = 512, num_blocks: int = 400) -> ReplaySettings:
    return ReplaySettings(
        trace=SMALL,
        num_requests=num_requests,
        num_prefill=1,
        num_decode=2,
        num_blocks=num_blocks,
        block_size=block_size,
        max_step_tokens=8192,
        slo=Slo(ttft_s=2.0, tpot_s=0.05),
    )


def make_comparison(out: Path, *policies: str, settings: ReplaySettings | None = None) -> PolicyComparison:
    return PolicyComparison(
        settings=settings or make_settings(),
        policies=policies or ("round_robin", "predictive"),
        speeds=(1.0,),
        out=out,
    )


def run(comparison: PolicyComparison, *, num_jobs: int = 1) -> tuple[list[CellResult], list[ReplayCell]]:
    """Return all results, and the cells in the order in which they were reported."""
    reported: list[ReplayCell] = []
    comparison.prepare()
    results = comparison.run(num_jobs=num_jobs, report=lambda result: reported.append(result.cell))
    return results, reported


def files(out: Path) -> dict[str, bytes]:
    """Return all files that are functions of the settings."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != "clock.json"
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two finished cells, to be read."""
    out = tmp_path_factory.mktemp("finished")
    run(make_comparison(out))
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder, to be changed."""
    return shutil.copytree(finished, tmp_path / "copy")


def test_two_runs_are_equal_byte_for_byte_in_one_process_and_in_two(finished: Path, tmp_path: Path) -> None:
    run(make_comparison(tmp_path), num_jobs=2)
    assert len(files(finished)) == 1 + 2 * 3
    assert files(tmp_path) == files(finished)


def test_every_request_of_the_trace_has_one_result(finished: Path) -> None:
    comparison = make_comparison(finished, "round_robin")
    (result,), _ = run(comparison)
    requests = list(read_requests(comparison.folder(result.cell) / REQUESTS_FILE))
    assert [request.index for request in requests] == list(range(NUM_REQUESTS))
    assert result.summary.figures.num_complete == sum(request.is_complete for request in requests) == NUM_REQUESTS
    assert result.clock.num_choices == NUM_REQUESTS


def test_finished_cells_are_not_run_again(copy: Path) -> None:
    shutil.rmtree(copy / "cells" / "predictive@1")
    before, _ = run(make_comparison(copy, "round_robin"))
    results, reported = run(make_comparison(copy, "predictive", "round_robin"))
    assert [result.cell.policy for result in results] == ["predictive", "round_robin"]
    assert [cell.policy for cell in reported] == ["round_robin", "predictive"]  # what was there comes first
    assert results[1] == before[0]  # its clock, too


def test_interrupted_cell_is_run_again(finished: Path, copy: Path) -> None:
    folder = copy / "cells" / "round_robin@1"
    (folder / "summary.json").unlink()
    (folder / "requests.jsonl").write_text("half a li")
    run(make_comparison(copy))
    assert files(copy) == files(finished)


def test_folder_with_results_of_other_settings_is_refused_until_they_are_forgotten(copy: Path) -> None:
    other = make_comparison(copy, "round_robin", settings=make_settings(num_requests=5))
    with pytest.raises(OtherSettings, match=r"other settings \(num_requests differ\)"):
        other.prepare()
    other.results.forget()
    (result,), _ = run(other)
    assert result.summary.figures.num_requests == 5


def test_pages_that_do_not_divide_the_traces_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="pages of 96 tokens do not divide the trace's blocks of 512"):
        make_comparison(tmp_path, settings=make_settings(block_size=96)).prepare()


def test_worker_that_is_too_small_for_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="a worker has 3 pages of 512"):
        make_comparison(tmp_path, settings=make_settings(num_blocks=3)).prepare()
    assert not (tmp_path / "settings.json").exists()


def test_report_holds_settings_table_and_plots_and_needs_no_other_file(copy: Path) -> None:
    comparison = make_comparison(copy)
    results, _ = run(comparison)
    page = write_report(comparison, results).read_text()
    scripts = check(page).scripts
    assert "workers    1P2D, llama-70b on h100-tp4, 400 pages of 512 tokens each" in page
    assert "predictive" in (copy / "table.txt").read_text()
    assert sum(name.startswith("data-") for name in scripts) == 6


def test_settings_are_told_by_content_of_files(tmp_path: Path) -> None:
    settings = make_settings()
    assert str(SMALL) not in json.dumps(settings.fingerprint())


def test_perfect_signals_come_at_once_however_late_the_others_are(tmp_path: Path) -> None:
    soon = make_settings(num_requests=60)
    late = replace(soon, report_interval_s=5.0, event_lag_s=1.0)
    fates = []
    for name, settings in (("soon", soon), ("late", late)):
        comparison = make_comparison(tmp_path / name, "greedy_perfect_signals", "least_load", settings=settings)
        run(comparison)
        fates.append([(comparison.folder(cell) / "requests.jsonl").read_bytes() for cell in comparison.cells])
    (perfect_soon, other_soon), (perfect_late, other_late) = fates
    assert perfect_soon == perfect_late
    assert other_soon != other_late


def test_stages_warp_the_clock_on_top_of_a_cells_speed(tmp_path: Path) -> None:
    stages = SpeedStages(
        name="slow, then fast", stages=(SpeedStage(length_s=2, speed=0.5), SpeedStage(length_s=1e6, speed=2))
    )
    settings = replace(make_settings(), stages=stages)
    plain = replayed_trace(make_settings(), 2.0).requests
    assert plain[-1].arrival_s > 1.0

    requests = replayed_trace(settings, 2.0).requests
    assert [request.arrival_s for request in requests] == pytest.approx(
        [2 * r.arrival_s if r.arrival_s < 1 else 2 + (r.arrival_s - 1) / 2 for r in plain]
    )
    comparison = make_comparison(tmp_path, "round_robin", settings=settings)
    (result,), _ = run(comparison)
    due_s = [request.due_s for request in read_requests(comparison.folder(result.cell) / REQUESTS_FILE)]
    assert due_s == pytest.approx([request.arrival_s for request in replayed_trace(settings, 1.0).requests])

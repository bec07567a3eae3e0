"""`kvrelay bench report` judges a finished run again; `kvrelay bench compare` puts runs side by side."""

import json
from pathlib import Path

from cli.bench_results import _names as names_of
from tests.cli.conftest import Run
from tests.measure.load.made_runs import made_run, write_run


def test_bench_report_judges_a_run_by_other_objectives(run: Run, folder: Path) -> None:
    write_run(made_run(), folder / "there")
    strict = run("bench", "report", "there", "--ttft", "0.1", "--warm-up", "0", "--check", "0.5")
    assert strict.exit_code == 3
    assert "SLOs are not met: 0.0 % good" in strict.stdout
    assert (folder / "there" / "report.html").exists()
    assert "SLOs are not met" in run("bench", "report", "there", "--no-report").stdout  # as it was judged last
    assert "SLOs are met" in run("bench", "report", "there", "--no-report", "--ttft", "0.3").stdout


def test_bench_report_of_a_folder_with_a_broken_summary_names_it(run: Run, folder: Path) -> None:
    write_run(made_run(), folder / "there")
    (folder / "there" / "summary.json").write_text("{}")
    result = run("bench", "report", "there")
    assert result.exit_code == 1
    assert "there/summary.json: is not a summary of a run" in result.stderr


def test_bench_report_that_counts_nothing_says_when_requests_were_due(run: Run, folder: Path) -> None:
    write_run(made_run(), folder / "there")
    result = run("bench", "report", "there", "--warm-up", "60")
    assert result.exit_code == 1
    assert "no request was due between 60 s (warm-up) and 39 s; requests were due until 39 s" in result.stderr


def test_bench_report_of_a_folder_without_results_names_it(run: Run, folder: Path) -> None:
    (folder / "empty").mkdir()
    result = run("bench", "report", "empty")
    assert result.exit_code == 1
    assert "empty" in result.stderr
    assert "Traceback" not in result.stderr


def test_bench_compare_puts_runs_side_by_side(run: Run, folder: Path) -> None:
    write_run(made_run(), folder / "before")
    write_run(made_run(ttft_s=0.3), folder / "after")
    result = run("bench", "compare", "before", "after", "--warm-up", "0")
    assert result.exit_code == 0, result.output
    (line,) = [line.split() for line in result.stdout.splitlines() if line.split()[:2] == ["TTFT", "p50"]]
    assert line == ["TTFT", "p50", "all", "200", "ms", "300", "ms", "×1.5", "[1.5", "–", "1.5],", "worse"]
    assert "before" in result.stdout
    assert (folder / "after" / "comparison.html").read_text().startswith("<!doctype html>")
    assert "Compared request by request: B." in result.stdout


def test_bench_compare_as_json_names_the_runs(run: Run, folder: Path) -> None:
    for name in ("a", "b"):
        write_run(made_run(name=name), folder / name)
    compared = json.loads(run("bench", "compare", "a", "b", "--json").stdout)
    assert compared["names"] == ["a", "b"]
    assert compared["is_paired"] == [True, True]


def test_bench_compare_writes_its_page_where_it_is_asked_to(run: Run, folder: Path) -> None:
    for name in ("a", "b"):
        write_run(made_run(name=name), folder / name)
    assert run("bench", "compare", "a", "b", "--out", "pages/ab.html").exit_code == 0
    assert (folder / "pages" / "ab.html").exists()
    assert not (folder / "b" / "comparison.html").exists()


def test_bench_compare_of_one_run_is_refused(run: Run, folder: Path) -> None:
    result = run("bench", "compare", "alone")
    assert result.exit_code == 1
    assert "compare takes two or more folders of results" in result.stderr


def test_compared_runs_of_one_name_are_told_apart_by_folder_or_number() -> None:
    assert names_of([Path("x/a"), Path("x/b")], ["chat", "chat"]) == ["a", "b"]
    assert names_of([Path("x/a"), Path("y/a")], ["chat", "chat"]) == ["chat 1", "chat 2"]
    assert names_of([Path("x/a"), Path("y/a")], ["chat", "batch"]) == ["chat", "batch"]

"""`kvrelay experiment`: output before anything is started. Runs themselves: test_real.py."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from cli.main import app
from tests.measure.experiment.test_real import EXPERIMENT

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    return lambda *arguments: runner.invoke(app, list(arguments), prog_name="kvrelay")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experiment of one shape, 1P1D, whose aggregated rival is not named."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | {"shapes": ["1P1D"], "grid": {}}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            (),
            (
                "1P1D: 1 prefill, 1 decode workers",
                "2 aggregated: 2 workers",
                "2 runs, at 20 requests/s, 1 of each; about ",
            ),
        ),
        (("--find-capacity",), ("a search of at most 20 loads on each arm: at most ",)),
        (("--only", "1P1D", "--loads", "1,2,4"), ("3 runs, at 1, 2, 4 requests/s",)),
    ],
)
def test_dry_run_tells_arms_runs_and_time_and_writes_nothing(
    run: Run, file: Path, options: tuple[str, ...], told: tuple[str, ...]
) -> None:
    result = run("experiment", "run", str(file), "--out", "out", "--dry-run", *options)
    assert result.exit_code == 0
    assert "2 aggregated is added, to compare with" in result.stderr
    for text in told:
        assert text in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "9P9D"), "there is no arm '9P9D'; there are 1P1D, 2 aggregated"),
        (("--loads", "fast"), "--loads: 'fast'; say positive numbers"),
        (("--loads", "0"), "--loads: '0'; say positive numbers"),
    ],
)
def test_option_that_makes_no_sense_is_explained(run: Run, file: Path, options: tuple[str, ...], message: str) -> None:
    result = run("experiment", "run", str(file), "--out", "out", *options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not Path("out").exists()


def test_real_run_of_an_arm_that_only_simulations_have_is_refused(run: Run, file: Path) -> None:
    raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    file.write_text(yaml.safe_dump(raw | {"grid": {"simulate.policy": ["mooncake"]}}), encoding="utf-8")
    result = run("experiment", "run", str(file), "--out", "out")
    assert "arm 1P1D policy=mooncake: simulate.policy is for simulations; run it with --simulate" in result.stderr


def test_session_too_large_for_a_workers_pages_is_refused_before_the_start(run: Run, file: Path) -> None:
    raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    raw["serving"]["pools"] = {"decode": {"num_blocks": 10}}
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    result = run("experiment", "run", str(file), "--out", "out")
    assert result.exit_code == 1
    assert (
        "its longest request has 204 tokens, the answer included; a decode worker has 10 pages of 16" in result.stderr
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": {"streams": [{"name": "chats", "output_tokens": "many"}]}}, "workload.streams.0.output_tokens: "),
        ({"capacity": {"kinds": ["agents"]}}, "capacity.kinds: no stream sends 'agents'; there are chats, documents"),
    ],
)
def test_workload_with_a_mistake_names_file_and_key(
    run: Run, file: Path, changes: dict[str, object], message: str
) -> None:
    raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    file.write_text(yaml.safe_dump(raw | changes), encoding="utf-8")
    result = run("experiment", "run", str(file), "--out", "out")
    assert f"tiny.yaml:{message}" in result.stderr


def test_report_of_an_empty_folder_says_what_to_do(run: Run, tmp_path: Path) -> None:
    result = run("experiment", "report", str(tmp_path))
    assert result.exit_code == 1
    assert "holds no results of an experiment; make some with `kvrelay experiment run`" in result.stderr

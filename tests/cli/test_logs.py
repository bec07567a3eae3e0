import json
from pathlib import Path

import pytest

from tests.cli.conftest import FakeLifecycle, Run


def line(msg: str, **extra: object) -> str:
    entry = {"ts": "2026-01-02T03:04:05.678Z", "level": "info", "process": "x", "logger": "l", "msg": msg, **extra}
    return json.dumps(entry) + "\n"


@pytest.fixture
def log_dir(lifecycle: FakeLifecycle) -> Path:
    folder = lifecycle.default_run_dir("kvrelay") / "logs"
    folder.mkdir(parents=True)
    (folder / "router-0.log").write_text(line("one") + line("two", request_id="req-1") + "not json\n")
    (folder / "decode-0.log").write_text(line("three"))
    return folder


def test_logs_are_readable(run: Run, log_dir: Path) -> None:
    result = run("logs", "router")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "03:04:05.678 info    router-0     one",
        "03:04:05.678 info    router-0     two request_id=req-1",
        "router-0     not json",
    ]


def test_logs_of_all_processes_are_limited_each(run: Run, log_dir: Path) -> None:
    result = run("logs", "--lines", "1", "--raw")
    assert result.stdout.splitlines() == ["not json", line("three").strip()]


def test_logs_of_all_processes_are_in_the_order_of_time(run: Run, log_dir: Path) -> None:
    (log_dir / "router-0.log").write_text(line("first", ts="2026-01-02T03:04:05.000Z") + "no time\n" + line("third"))
    (log_dir / "decode-0.log").write_text(line("second", ts="2026-01-02T03:04:05.100Z"))
    shown = run("logs").stdout.splitlines()
    assert [text.split()[-1] for text in shown] == ["first", "time", "second", "third"]


def test_logs_with_a_traceback_show_it(run: Run, log_dir: Path) -> None:
    (log_dir / "router-0.log").write_text(line("failed", exc="Traceback …\nValueError: x"))
    assert run("logs", "router").stdout.endswith("failed\nTraceback …\nValueError: x\n")


def test_logs_of_an_unknown_process_name_the_known_ones(run: Run, log_dir: Path) -> None:
    result = run("logs", "prefill-9")
    assert result.exit_code == 1
    assert "there are: decode-0, router-0" in result.stderr


def test_logs_without_a_run_folder_say_so(run: Run) -> None:
    result = run("logs")
    assert result.exit_code == 1
    assert "there are no logs in" in result.stderr


def test_logs_follow_shows_whole_new_lines_until_interrupted(
    run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [line("later")[:10], line("later")[10:], line("last")]

    def write_next(seconds: float) -> None:
        if not pieces:
            raise KeyboardInterrupt
        with (log_dir / "router-0.log").open("a") as stream:
            stream.write(pieces.pop(0))

    monkeypatch.setattr("cli.logs.sleep", write_next)
    result = run("logs", "router", "--follow", "--lines", "0")
    assert result.exit_code == 0
    assert [shown.split()[-1] for shown in result.stdout.splitlines()] == ["later", "last"]


def test_logs_follow_goes_on_over_rotations_without_losing_a_line(
    run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_dir / "router-0.log"
    writing = log.open("a")
    turns = iter(range(12))

    def write_next(seconds: float) -> None:
        nonlocal writing
        turn = next(turns, None)
        if turn is None:
            writing.close()
            raise KeyboardInterrupt
        if turn in (3, 7):
            log.replace(log.with_name(f"router-0.log.{turn}"))
        if turn in (4, 8):
            log.touch()
        if turn in (5, 9):
            writing.close()
            writing = log.open("a")
        writing.write(line(f"line-{turn}"))
        writing.flush()

    monkeypatch.setattr("cli.logs.sleep", write_next)
    result = run("logs", "router", "--follow", "--lines", "0")
    shown = [text.split()[-1] for text in result.stdout.splitlines()]
    assert shown == [f"line-{turn}" for turn in range(12)]


def test_logs_show_lines_from_before_a_rotation(run: Run, log_dir: Path) -> None:
    (log_dir / "router-0.log").rename(log_dir / "router-0.log.1")
    (log_dir / "router-0.log").write_text(line("new"))
    shown = run("logs", "router", "--lines", "3").stdout.splitlines()
    assert [text.split()[3] for text in shown if text.startswith("03")] == ["two", "new"]


@pytest.mark.parametrize(("begun", "names"), [("de", ["decode", "decode-0"]), ("fork", ["fork-server"]), ("x", [])])
def test_shell_completes_processes_and_pools(run: Run, lifecycle: FakeLifecycle, begun: str, names: list[str]) -> None:
    folder = lifecycle.default_run_dir("kvrelay") / "logs"
    folder.mkdir(parents=True)
    for name in ("decode-0", "router-0", "fork-server"):
        (folder / f"{name}.log").touch()
    environment = {"_KVRELAY_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": f"kvrelay logs {begun}"}
    told = run(env=environment).stdout
    assert [name for name in ("decode", "decode-0", "fork-server", "router-0") if f'"{name}"' in told] == names

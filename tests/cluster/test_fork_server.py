"""Services that a fork server forks behave like those that start by themselves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("setproctitle", reason="no setproctitle: forks do not show their command lines")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="services are forked on Linux only")

_ROOT = Path(__file__).parents[2]


_MODULE = """import sys
WORD = "old"
print("imported", file=sys.stderr)
"""


@contextmanager
def begun(folder: Path, scenario: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "spoken.py").write_text(_MODULE)
    command = [sys.executable, "-P", "-m", "tests.cluster.forking_supervisor", str(folder), scenario]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{_ROOT}"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told_by(folder: Path, scenario: str) -> Any:
    """Return what a scenario tells, after which no process is left."""
    with begun(folder, scenario) as supervisor:
        text, _ = supervisor.communicate(timeout=60)
    told = json.loads(text)
    assert told["left"] == 0
    return told["told"]


def test_forked_service_is_a_child_with_its_own_session_streams_and_command_line(tmp_path: Path) -> None:
    told = told_by(tmp_path, "life")

    assert told["address"] == "decode-0.invalid:1"
    assert told["is_child"]
    assert told["leads_session"]
    assert told["command"].endswith("-P -m tests.cluster.fake_service decode-0.invalid:1")
    assert told["descriptors"] == ["0", "1", "2"]
    assert told["is_over"]
    assert told["end"] == "killed by SIGTERM"
    assert (tmp_path / "logs" / "decode-0.log").read_text() == "hello from the log\n"


def test_end_of_a_forked_service_is_told_with_its_reason(tmp_path: Path) -> None:
    assert told_by(tmp_path, "kill") == "killed by SIGKILL"
    reason = "decode-2: exited with code 3 before it was ready\nhello from the log\nport is taken"
    assert told_by(tmp_path, "failure") == reason


def test_death_of_the_fork_server_ends_no_service_and_prevents_none(tmp_path: Path) -> None:
    assert told_by(tmp_path, "lost_server") == ["decode-5.invalid:1", "sleeping", True]


def test_fork_server_that_stands_still_holds_up_no_start_for_long(tmp_path: Path) -> None:
    assert told_by(tmp_path, "stopped_server") == "decode-5.invalid:1"


def test_service_has_the_modules_as_they_are_when_it_starts_and_ids_of_its_own(tmp_path: Path) -> None:
    told = told_by(tmp_path, "changed_module").splitlines()[1::2]
    assert [line.split()[0] for line in told] == ["old", "old", "new"]
    assert len({line.split()[1] for line in told}) == 3
    assert (tmp_path / "logs" / "fork-server.log").read_text() == "imported\n" * 2


def test_secrets_of_the_routers_are_not_in_the_fork_server(tmp_path: Path) -> None:
    assert told_by(tmp_path, "secrets") == ["hush-hush", "", ""]


def test_children_that_dead_services_leave_become_no_zombies(tmp_path: Path) -> None:
    assert told_by(tmp_path, "strays") is True


def test_cancelled_start_leaves_no_forked_service(tmp_path: Path) -> None:
    assert told_by(tmp_path, "cancelled") == 1


def test_death_of_the_supervisor_ends_services_and_fork_server(tmp_path: Path) -> None:
    with begun(tmp_path, "endless") as supervisor:
        assert supervisor.stdout is not None
        children = [psutil.Process(pid) for pid in json.loads(supervisor.stdout.readline())]
        assert len(children) == 2
        supervisor.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive

"""Services that a fork server forks behave like those that start by themselves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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


Tell = Callable[[str], Any]


@pytest.fixture(scope="module")
def supervisors() -> Iterator[subprocess.Popen[str]]:
    """Yield a process that forks a supervisor for each scenario."""
    command = [sys.executable, "-P", "-m", "tests.cluster.forking_supervisor"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def supervised(supervisors: subprocess.Popen[str], tmp_path: Path) -> Tell:
    """Return what a scenario in this test's folder tells; `left` are the children that it has then."""

    def run(scenario: str) -> Any:
        assert supervisors.stdin is not None
        assert supervisors.stdout is not None
        (tmp_path / "spoken.py").write_text(_MODULE)
        supervisors.stdin.write(f"{tmp_path} {scenario}\n")
        supervisors.stdin.flush()
        return json.loads(supervisors.stdout.readline())

    return run


@pytest.fixture
def told_by(supervised: Tell) -> Tell:
    """Return what a scenario tells, after which no process is left."""

    def run(scenario: str) -> Any:
        told = supervised(scenario)
        assert told["left"] == 0
        return told["told"]

    return run


def test_forked_service_is_a_child_with_its_own_session_streams_and_command_line(told_by: Tell, tmp_path: Path) -> None:
    told = told_by("life")

    assert told["address"] == "decode-0.invalid:1"
    assert told["is_child"]
    assert told["leads_session"]
    assert told["command"].endswith("-P -m tests.cluster.fake_service decode-0.invalid:1")
    assert told["descriptors"] == ["0", "1", "2"]
    assert told["is_over"]
    assert told["end"] == "killed by SIGTERM"
    assert (tmp_path / "logs" / "decode-0.log").read_text() == "hello from the log\n"


def test_death_of_the_fork_server_ends_no_service_and_prevents_none(told_by: Tell) -> None:
    assert told_by("lost_server") == ["decode-5.invalid:1", "sleeping", True]


def test_fork_server_that_stands_still_holds_up_no_start_for_long(told_by: Tell) -> None:
    assert told_by("stopped_server") == "decode-5.invalid:1"


def test_service_has_the_modules_as_they_are_when_it_starts_and_ids_of_its_own(told_by: Tell, tmp_path: Path) -> None:
    told = told_by("changed_module").splitlines()[1::2]
    assert [line.split()[0] for line in told] == ["old", "old", "new"]
    assert len({line.split()[1] for line in told}) == 3
    assert (tmp_path / "logs" / "fork-server.log").read_text() == "imported\n" * 2


def test_secrets_of_the_routers_are_not_in_the_fork_server(told_by: Tell) -> None:
    assert told_by("secrets") == ["hush-hush", "", ""]


def test_children_that_dead_services_leave_become_no_zombies(told_by: Tell) -> None:
    assert told_by("strays") is True


def test_cancelled_start_leaves_no_forked_service(told_by: Tell) -> None:
    assert told_by("cancelled") == 1


def test_death_of_the_supervisor_ends_services_and_fork_server(supervised: Tell) -> None:
    supervisor, *children = map(psutil.Process, supervised("endless")["told"])
    assert len(children) == 2
    supervisor.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive

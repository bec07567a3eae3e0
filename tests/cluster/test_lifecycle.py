"""up, down and read_info, without services: state handling, ports, models."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.lifecycle import ClusterError, default_run_dir, down, read_info, up
from cluster.processes.state import StateFile
from common.config import ServingConfig
from common.process import ProcessIdentity
from tests.cluster.support import make_config
from tests.cluster.test_state import make_state

_DEAD = ProcessIdentity(pid=os.getpid(), birth="another-boot:1")


def ignore(text: str) -> None:
    """Drop a report."""


def start(config: ServingConfig, run_dir: Path) -> None:
    up(config, config_path=Path("serving.yaml"), run_dir=run_dir, report=ignore)


@contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """Run a process that waits."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        identity = ProcessIdentity.of(process.pid)
        assert identity is not None
        try:
            yield process, identity
        finally:
            process.kill()


@pytest.mark.parametrize("supervisor", [None, _DEAD], ids=["empty folder", "reused pid"])
def test_read_info_without_a_live_supervisor_is_none(tmp_path: Path, supervisor: ProcessIdentity | None) -> None:
    if supervisor is not None:
        StateFile(tmp_path).write(make_state(supervisor=supervisor))

    assert read_info(tmp_path) is None


def test_read_info_of_a_live_supervisor_has_address_and_pid(tmp_path: Path) -> None:
    with sleeper() as (process, identity):
        StateFile(tmp_path).write(make_state(supervisor=identity))

        info = read_info(tmp_path)

    assert info is not None
    assert (info.address, info.pid, info.run_dir) == ("127.0.0.1:50051", process.pid, tmp_path)


def test_down_of_nothing_is_false(tmp_path: Path) -> None:
    assert down(tmp_path, report=ignore) is False


def test_down_when_the_supervisor_was_killed_kills_what_it_left_and_no_stranger(tmp_path: Path) -> None:
    with sleeper() as (_, orphan_identity), sleeper() as (stranger, _):
        reused = ProcessIdentity(pid=stranger.pid, birth="another-boot:1")
        StateFile(tmp_path).write(make_state(supervisor=_DEAD, members=(orphan_identity, reused)))

        assert down(tmp_path, report=ignore) is True

        assert not orphan_identity.is_alive()
        assert stranger.poll() is None
    assert StateFile(tmp_path).read() is None


def test_down_stops_the_supervisor_without_having_to_kill_it(tmp_path: Path) -> None:
    with sleeper() as (_, identity):
        StateFile(tmp_path).write(make_state(supervisor=identity))
        reports: list[str] = []

        assert down(tmp_path, report=reports.append) is True

        assert not identity.is_alive()
    assert reports == ["stopping the cluster on 127.0.0.1:50051: the router drains first", "stopped"]


def test_up_where_a_cluster_runs_names_its_address(tmp_path: Path) -> None:
    with sleeper() as (_, identity):
        StateFile(tmp_path).write(make_state(supervisor=identity))

        with pytest.raises(ClusterError, match=r"already runs.*127\.0\.0\.1:50051"):
            start(make_config(), tmp_path)


@pytest.mark.parametrize("key", ["port", "http_port"])
def test_up_when_a_port_is_taken_names_file_key_and_port(tmp_path: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ClusterError, match=rf"serving\.yaml:router\.{key}: 127\.0\.0\.1:{port} is taken"):
            start(make_config(router={"port": 0, key: port}), tmp_path)


def test_up_when_the_host_is_not_ours_names_file_and_key(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"serving\.yaml:router\.host: cannot listen on 192\.0\.2\.77"):
        start(make_config(router={"host": "192.0.2.77", "port": 0}), tmp_path)


def test_up_when_the_model_is_missing_says_so_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(model={"id": str(tmp_path / "no-such-model")})

    with pytest.raises(ClusterError, match="no-such-model"):
        start(config, tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_default_run_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_RUN_DIR", str(tmp_path))
    assert default_run_dir("blue") == tmp_path / "blue"

    monkeypatch.delenv("KVRELAY_RUN_DIR")
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    assert default_run_dir("blue") == tmp_path / "cache" / "run" / "blue"


def test_up_beside_a_supervisor_that_has_just_started_says_so_and_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.lifecycle.read_info", lambda _run_dir: None)
    with sleeper() as (process, identity):
        StateFile(tmp_path).write(make_state(supervisor=identity))

        with pytest.raises(ClusterError, match=f"a supervisor \\({process.pid}\\) is alive"):
            start(make_config(), tmp_path)
        assert process.poll() is None

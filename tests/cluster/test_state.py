"""state.json, the run folder's lock and the starter's events."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.processes.run_lock import RunDirTaken, lock_run_dir
from cluster.processes.starter import Failed, Progress, Up, parse_event
from cluster.processes.state import ClusterPhase, ClusterState, ProcessPhase, ProcessState, StateFile
from common.process import ProcessIdentity


def make_state(*, supervisor: ProcessIdentity, members: tuple[ProcessIdentity, ...] = ()) -> ClusterState:
    return ClusterState(
        name="kvrelay",
        launcher="local",
        phase=ClusterPhase.READY,
        supervisor=supervisor,
        addresses=("127.0.0.1:50051",),
        http_addresses=("127.0.0.1:8000",),
        tls="/run/tls/ca.pem",
        processes=tuple(
            ProcessState(
                name=f"decode-{idx}",
                role="decode",
                phase=ProcessPhase.READY,
                identity=identity,
                address="127.0.0.1:1",
                metrics_port=0,
                num_restarts=0,
                last_exit="",
            )
            for idx, identity in enumerate(members)
        ),
        helpers=(supervisor,),
        ray_environment={},
    )


def test_state_reads_back_as_written(tmp_path: Path) -> None:
    state = make_state(supervisor=ProcessIdentity(pid=5, birth="b:1"), members=(ProcessIdentity(pid=6, birth="b:2"),))

    StateFile(tmp_path).write(state)

    assert StateFile(tmp_path).read() == state
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 0}', '{"format": 3, "name": "x"}'])
def test_state_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)

    assert StateFile(tmp_path).read() is None


def test_lock_held_by_another_process_is_refused_and_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, signal; from pathlib import Path; from cluster.processes.run_lock import lock_run_dir\n"
        "with lock_run_dir(Path(sys.argv[1])): print(1, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(RunDirTaken, match=str(tmp_path)), lock_run_dir(tmp_path):
            pass
        holder.kill()
    with lock_run_dir(tmp_path):
        assert os.path.exists(tmp_path / "lock")


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('{"event": "progress", "text": "t"}\n', Progress(text="t")),
        (
            '{"event": "ready", "addresses": ["a:1", "b:1"], "http_addresses": ["a:2"], "pid": 3, "tls": false}',
            Up(addresses=("a:1", "b:1"), http_addresses=("a:2",), pid=3, tls=False),
        ),
        ('{"event": "failed", "reason": "r"}', Failed(reason="r")),
        ('{"event": "else"}', None),
        ('{"event": "progress"}', None),
        ("noise", None),
        ("[1]", None),
        ("3", None),
    ],
)
def test_parse_event(line: str, event: object) -> None:
    assert parse_event(line) == event

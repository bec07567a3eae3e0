"""state.json, what a later supervisor takes over from it, the run folder's lock and the starter's events."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.processes.life import ProcessPhase
from cluster.processes.plan import make_plan
from cluster.processes.run_dir import RunDirTaken, lock_run_dir
from cluster.processes.starter import StartFailure, StartStep, Up, parse_event
from cluster.processes.state import (
    ClusterPhase,
    ClusterState,
    ProcessState,
    StateFile,
    has_served,
    wanted_processes,
)
from common.process import ProcessIdentity
from tests.cluster.support import make_config

_SELF = ProcessIdentity(pid=1, birth="b:1")


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
        "import sys, signal; from pathlib import Path; from cluster.processes.run_dir import lock_run_dir\n"
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
        ('{"event": "progress", "text": "t"}\n', StartStep(text="t")),
        (
            '{"event": "ready", "addresses": ["a:1", "b:1"], "http_addresses": ["a:2"], "pid": 3, "tls": false}',
            Up(addresses=("a:1", "b:1"), http_addresses=("a:2",), pid=3, tls=False),
        ),
        ('{"event": "failed", "reason": "r"}', StartFailure(reason="r")),
        ('{"event": "else"}', None),
        ('{"event": "progress"}', None),
        ("noise", None),
        ("[1]", None),
        ("3", None),
    ],
)
def test_parse_event(line: str, event: object) -> None:
    assert parse_event(line) == event


def wanted(found: set[str], last: ClusterState | None = None, **pools: int) -> list[str]:
    config = make_config(launcher="ray", pools={role: {"count": count} for role, count in pools.items()})
    return [spec.name for spec in wanted_processes(config, partial(make_plan, host=None), found=found, last=last)]


def recorded(*names: str) -> ClusterState:
    """Return the state of a cluster with these processes."""
    state = make_state(supervisor=_SELF, members=(_SELF,))
    (process,) = state.processes
    return replace(state, processes=tuple(replace(process, name=name) for name in names))


@pytest.mark.parametrize(
    ("found", "last", "pools", "expected"),
    [
        ("r0 p0 d0 d1 d2", "r0 p0 d0 d1 d2", {}, "r0 p0 d0 d1 d2"),
        ("r0 d1", "r0 d1", {"prefill": 2, "decode": 3}, "r0 d1"),
        ("r0 p0 d0", "r0 p0 d0 d1", {}, "r0 p0 d0 d1"),
        ("r0 d2", None, {"prefill": 1, "decode": 1}, "r0 p0 d0 d2"),
        ("r0 p0 d0 dx cache", None, {}, "r0 p0 d0"),
    ],
    ids=["grown since", "shrunk since", "one was away", "no state", "unknown names"],
)
def test_later_supervisor_wants_what_runs_and_what_was_recorded(
    found: str, last: str | None, pools: dict[str, int], expected: str
) -> None:
    state = None if last is None else recorded(*names_of(last))

    assert wanted(set(names_of(found)), state, **pools) == names_of(expected)


def names_of(short: str) -> list[str]:
    roles = {"r": "router", "p": "prefill", "d": "decode"}
    return [f"{roles[each[0]]}-{each[1:]}" if len(each) == 2 else each for each in short.split()]


@given(numbers=st.sets(st.integers(0, 40)))
def test_every_worker_found_is_wanted_once_under_its_own_name(numbers: set[int]) -> None:
    found = {f"decode-{number}" for number in numbers}

    names = wanted(found, recorded("router-0", "decode-0"))

    assert set(names) == found | {"router-0", "decode-0"}
    assert len(names) == len(set(names))


@pytest.mark.parametrize("phase", list(ClusterPhase))
def test_only_what_served_is_adopted_and_what_was_being_stopped_is_stopped(phase: ClusterPhase) -> None:
    last = replace(recorded("router-0"), phase=phase)

    assert has_served({"router-0"}, last) is (phase in (ClusterPhase.READY, ClusterPhase.ADOPTING))
    assert last.phase.is_end is (phase in (ClusterPhase.STOPPING, ClusterPhase.FAILED))


def test_actors_without_a_state_are_a_cluster_that_served_and_none_are_not() -> None:
    assert has_served({"decode-0"}, None)
    assert not has_served(set(), None)

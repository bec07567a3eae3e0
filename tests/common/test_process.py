"""Process identity, dying with the parent, the ready line."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from common.process import ProcessIdentity, Ready, list_gpus, parse_ready, process_birth


def test_identity_with_another_birth_is_not_alive_and_is_never_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        stranger = ProcessIdentity(pid=process.pid, birth="another:1")

        assert not stranger.is_alive()
        assert not stranger.signal(signal.SIGKILL)
        assert process.poll() is None
        process.kill()


def test_identity_of_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # until it ends; nobody has reaped it yet
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert process_birth(process.pid) is None
    finally:
        process.stdout.close()
        process.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_die_with_parent_when_the_parent_is_killed_kills_the_child(tmp_path: Path) -> None:
    child = "from common.process import die_with_parent; import signal; die_with_parent(); print(1, flush=True)"
    parent = textwrap.dedent(
        f"""
        import os, signal, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {child + "; signal.pause()"!r}], stdout=subprocess.PIPE,
                                 env={{**os.environ, "KVRELAY_PARENT_PID": str(os.getpid())}})
        child.stdout.readline()
        print(child.pid, flush=True)
        signal.pause()
        """
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        grandchild = psutil.Process(int(process.stdout.readline()))
        process.kill()

        _, alive = psutil.wait_procs([grandchild], timeout=60)
    assert alive == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_die_with_parent_when_the_parent_was_gone_before_dies_at_once() -> None:
    code = "from common.process import die_with_parent; die_with_parent(); print('survived')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVRELAY_PARENT_PID": "1"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "[]",
        '"ready"',
        '{"event": "progress"}',
        '{"event": "ready"}',
        '{"event": "ready", "address": "a:1", "metrics_port": 0}',
        '{"event": "ready", "address": "a:1", "metrics_port": 0, "pid": 1}',
        '{"event": "ready", "address": 5, "admin_address": "a:2", "metrics_port": 0, "pid": 1}',
    ],
)
def test_parse_ready_of_anything_else_is_none(line: str) -> None:
    assert parse_ready(line) is None


def test_parse_ready_ignores_unknown_keys() -> None:
    line = '{"event": "ready", "address": "a:1", "admin_address": "a:2", "metrics_port": 0, "pid": 1, "epoch": 5}'

    assert parse_ready(line) == Ready(address="a:1", admin_address="a:2", metrics_port=0, pid=1)


def test_what_a_process_has_loaded_costs_no_pauses_of_the_garbage_collector() -> None:
    code = "import asyncio, gc, common.process as p; p.spare_loaded_objects(); print(len(gc.get_objects()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert int(told) < 100, "each is looked at by every full collection"


def test_card_cut_into_mig_slices_counts_as_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        textwrap.dedent(
            """\
            #!/bin/sh
            cat <<'END'
            GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
            GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
              MIG 3g.71gb     Device  0: (UUID: MIG-cccc)
              MIG 3g.71gb     Device  1: (UUID: MIG-dddd)
            END
            """
        ),
        encoding="utf-8",
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert list_gpus() == ["0", "MIG-cccc", "MIG-dddd"]
